"""Images of prompts: decoded by Pillow, cut to patches of bytes by the core, placed in the prompt's tokens."""
