// Elements made of parts. All text goes in as text: nothing here reads markup.

export function make(name, attributes = {}, ...parts) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else element.setAttribute(key, value === true ? "" : value);
  }
  element.append(...parts);
  return element;
}

export function byId(id) {
  return document.getElementById(id);
}

// A model's text with its code, bold words and headings set apart; the rest as it is.
export function formatted(text) {
  const blocks = [];
  const parts = text.split(/^```[^\n]*\n?/m);
  parts.forEach((part, number) => {
    if (number % 2) blocks.push(make("pre", {}, make("code", {}, part.replace(/\n$/, ""))));
    else blocks.push(...paragraphs(part).map((one) => make("p", {}, ...inline(one))));
  });
  return blocks;
}

function paragraphs(text) {
  return text.split(/\n{2,}/).map((one) => one.replace(/^\n+|\n+$/g, "")).filter((one) => one.trim());
}

const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*|^#{1,4} +(.+)$/gm;

function inline(text) {
  const parts = [];
  let end = 0;
  for (const found of text.matchAll(INLINE)) {
    const [whole, code, bold, heading] = found;
    parts.push(text.slice(end, found.index), code !== undefined ? make("code", {}, code) : make("strong", {}, bold ?? heading));
    end = found.index + whole.length;
  }
  return [...parts, text.slice(end)];
}
