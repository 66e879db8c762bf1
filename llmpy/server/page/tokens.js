// Tokens tinted by how unlikely they were; the alternatives of one beside it.

import { byId, make } from "./dom.js";

const STEPS = 6; // tints, one for each nat of doubt

// Gathers tokens into the pieces that can be shown: a character may be spread over several tokens.
export class Pieces {
  constructor() {
    this.pieces = [];
    this.decoder = new TextDecoder();
    this.pending = [];
  }

  add(tokens) {
    for (const token of tokens) {
      const text = token.bytes ? this.decoder.decode(new Uint8Array(token.bytes), { stream: true }) : token.token;
      this.pending.push(token);
      if (text) this.pieces.push({ text, tokens: this.pending.splice(0) });
    }
  }

  // What is left of a character that never became whole.
  end() {
    const text = this.decoder.decode();
    if (this.pending.length) this.pieces.push({ text: text || "\ufffd", tokens: this.pending.splice(0) });
  }
}

// From a completion's lists to a chat's objects.
export function fromLists(lists) {
  return lists.tokens.map((token, i) => ({
    token,
    logprob: lists.token_logprobs[i],
    top_logprobs: Object.entries(lists.top_logprobs[i] ?? {}).map(([other, logprob]) => ({ token: other, logprob })),
  }));
}

function doubt(tokens) {
  return Math.min(STEPS, Math.round(Math.max(...tokens.map((token) => -token.logprob))));
}

export class TokenView {
  constructor() {
    this.pieces = new Pieces();
    this.chosen = -1;
    this.element = make("div", {
      class: "tokens",
      tabindex: 0,
      role: "group",
      "aria-label": "Tokens; arrow keys show alternatives",
      onkeydown: (event) => this.key(event),
      onblur: () => this.choose(-1),
      onpointerover: (event) => this.point(event),
      onpointerleave: () => this.choose(-1),
      onclick: (event) => this.point(event),
    });
  }

  add(tokens) {
    this.pieces.add(tokens);
    this.draw();
  }

  end() {
    this.pieces.end();
    this.draw();
  }

  draw() {
    for (const piece of this.pieces.pieces.slice(this.element.childElementCount)) {
      const kind = /^\n+$/.test(piece.text) ? "line" : /^<[|/]?[^<>]+>$/.test(piece.text) ? "mark" : "";
      this.element.append(make("span", { class: `token d${doubt(piece.tokens)} ${kind}`.trim() }, piece.text));
    }
  }

  point(event) {
    const token = event.target.closest(".token");
    if (token) this.choose([...this.element.children].indexOf(token));
  }

  key(event) {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (step) this.choose(Math.min(Math.max(this.chosen + step, 0), this.element.childElementCount - 1));
    else if (event.key === "Escape" && this.chosen >= 0) this.choose(-1);
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  choose(index) {
    this.element.children[this.chosen]?.classList.remove("chosen");
    this.chosen = index;
    const token = this.element.children[index];
    token?.classList.add("chosen");
    show(token, this.pieces.pieces[index]);
  }
}

function show(element, piece) {
  const card = byId("alternatives");
  card.hidden = !element;
  if (!element) return;
  card.replaceChildren(...piece.tokens.map(table));
  const at = element.getClientRects()[0];
  const below = at.bottom + 8 + card.offsetHeight < innerHeight;
  card.style.left = `${Math.max(8, Math.min(at.left, innerWidth - card.offsetWidth - 8))}px`;
  card.style.top = `${below ? at.bottom + 8 : at.top - 8 - card.offsetHeight}px`;
}

function table(own) {
  const rows = own.top_logprobs.map((one) => row(one, one.token === own.token && one.logprob === own.logprob));
  if (!rows.some((one) => one.classList.contains("own"))) rows.push(row(own, true));
  return make("table", {}, make("tbody", {}, ...rows));
}

function row(one, isOwn) {
  const share = make("span", { class: "share" });
  share.style.width = `${100 * Math.exp(one.logprob)}%`;
  const cells = [make("td", {}, visible(one)), make("td", {}, share), make("td", {}, percent(one.logprob))];
  return make("tr", { class: isOwn ? "own" : "" }, ...cells);
}

// A token's text with its spaces; its bytes where they are no whole character.
function visible({ token, bytes }) {
  if (bytes && token.includes("\ufffd")) return bytes.map((byte) => byte.toString(16).padStart(2, "0")).join(" ");
  return token.replaceAll(" ", "␣").replaceAll("\n", "↵").replaceAll("\t", "⇥") || "∅";
}

function percent(logprob) {
  const share = 100 * Math.exp(logprob);
  return share >= 0.1 ? `${share.toFixed(1)} %` : `${logprob.toFixed(1)} nats`;
}
