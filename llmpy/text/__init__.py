"""Text: tokenizers, detokenizers, chat templates, the text of a running sample."""
