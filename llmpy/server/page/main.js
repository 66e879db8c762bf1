// Puts the page together: settings that are remembered, theme, state of the server, keys of the keyboard.

import { getJson, useKey } from "./api.js";
import { Chat } from "./chat.js";
import { byId, make } from "./dom.js";
import { Gauges } from "./plots.js";

const LOOK_MS = 1000;
const THEMES = ["auto", "light", "dark"];

const form = byId("settings");
const question = byId("question");
const send = byId("send");
const chat = new Chat({ settings, changed: draw, refused: (error) => error.status === 401 && wantKey(), giveBack });
const gauges = new Gauges(byId("plots"));
let isLost = false;

// ---- settings --------------------------------------------------------------------------------------------------------

function settings() {
  const wrong = [...form.elements].find((field) => field.willValidate && !field.checkValidity());
  if (wrong) throw new Error(`${wrong.labels[0].firstChild.textContent.trim()}: ${wrong.validationMessage}`);
  const made = { system: form.system.value.trim(), probabilities: form.probabilities.checked };
  for (const field of form.querySelectorAll("input[type=number]")) {
    if (field.value !== "") made[field.name] = field.valueAsNumber;
  }
  if (form.tools.value.trim()) {
    try {
      made.tools = JSON.parse(form.tools.value);
    } catch (error) {
      throw new Error(`Tools: ${error.message}`);
    }
  }
  return made;
}

function remember() {
  const fields = [...form.elements].filter((field) => field.name);
  const values = fields.map((field) => [field.name, field.type === "checkbox" ? field.checked : field.value]);
  localStorage.setItem("llmpy-settings", JSON.stringify(Object.fromEntries(values)));
}

function recall() {
  const stored = JSON.parse(localStorage.getItem("llmpy-settings") ?? "{}");
  for (const field of form.elements) {
    if (!(field.name in stored)) continue;
    if (field.type === "checkbox") field.checked = stored[field.name];
    else field.value = stored[field.name];
  }
}

// What the model does where a setting is left empty.
function showDefaults(defaults) {
  for (const [name, value] of Object.entries(defaults ?? {})) {
    if (!form[name]) continue;
    const isOff = value <= 0 && name !== "temperature";
    form[name].placeholder = `default ${isOff ? "off" : Number(value.toPrecision(4))}`;
  }
}

function useTheme(name) {
  document.documentElement.dataset.theme = name;
  localStorage.setItem("llmpy-theme", name);
  byId("theme-name").textContent = name;
}

// ---- the server ------------------------------------------------------------------------------------------------------

function wantKey() {
  const access = byId("access");
  if (!access.hidden) return;
  access.hidden = false;
  document.body.classList.add("showing-panel");
  byId("key").focus();
  chat.waitsFor = "This server wants a key";
  if (!chat.turns.length) chat.drawEmpty();
  draw();
}

// What is asked once, until it is answered.
async function meet() {
  const { data } = await getJson("v1/models");
  const { chat_template: template } = await getJson("tokenizer_info");
  chat.model = data[0].id;
  chat.hasTemplate = template !== null;
  const name = chat.model.split("/").filter(Boolean).at(-1);
  byId("model").textContent = `${name} · ${data[0].max_model_len.toLocaleString("en")} tokens`;
  byId("model").title = chat.model;
  byId("access").hidden = true;
  showDefaults(data[0].default_sampling_params);
  if (!chat.turns.length) chat.drawEmpty();
}

async function look() {
  if (!document.hidden) {
    try {
      if (!chat.model) await meet();
      await gauges.look();
      isLost = false;
    } catch (error) {
      isLost = true;
      if (error.status === 401) wantKey();
    }
    draw();
  }
  setTimeout(look, LOOK_MS);
}

// ---- drawing ---------------------------------------------------------------------------------------------------------

function say(state, text) {
  const place = byId("state");
  place.dataset.state = state;
  if (place.textContent !== text) place.textContent = text;
}

function draw() {
  if (!byId("access").hidden) say("waiting", "needs a key");
  else if (isLost) say("lost", chat.model ? "disconnected" : "no server");
  else if (!chat.model) say("waiting", "connecting");
  else if (gauges.running) say("busy", `${Math.round(gauges.speed)} tokens/s`);
  else say("ready", "ready");
  send.textContent = chat.running ? "Stop" : "Send";
  send.toggleAttribute("data-stop", chat.running);
  send.disabled = !chat.running && !chat.model;
  byId("export").disabled = !chat.turns.length;
  const [call] = chat.open;
  const usual = chat.hasTemplate ? "Ask anything" : "Text to go on with";
  question.placeholder = call && !chat.running ? `Result of ${call.name}` : usual;
}

// A question comes back, unless something else is being written.
function giveBack(text) {
  if (!question.value.trim()) question.value = text;
  fit();
  question.focus();
}

function save(name, text) {
  const address = URL.createObjectURL(new Blob([text], { type: "text/markdown" }));
  make("a", { href: address, download: name }).click();
  URL.revokeObjectURL(address);
}

function fit() {
  question.style.height = "auto";
  question.style.height = `${question.scrollHeight + 2}px`;
}

// ---- events ----------------------------------------------------------------------------------------------------------

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  if (chat.running) {
    chat.stop();
    return;
  }
  const text = question.value;
  if (chat.model && text.trim()) question.value = "";
  chat.say(text);
  fit();
  question.focus();
});
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!chat.running) byId("composer").requestSubmit();
});
question.addEventListener("input", fit);
document.addEventListener("keydown", (event) => event.key === "Escape" && chat.stop());
byId("new").addEventListener("click", () => {
  document.body.classList.remove("showing-panel");
  chat.clear();
  question.focus();
});
byId("export").addEventListener("click", () => save("conversation.md", chat.markdown()));
addEventListener("pagehide", () => chat.remember());
byId("theme").addEventListener("click", () => {
  const now = THEMES.indexOf(document.documentElement.dataset.theme);
  useTheme(THEMES[(now + 1) % THEMES.length]);
});
byId("toggle").addEventListener("click", () => {
  const showing = document.body.classList.toggle("showing-panel");
  byId("toggle").textContent = showing ? "Chat" : "Settings";
});
byId("access").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey(byId("key").value.trim());
  byId("access").hidden = true;
  document.body.classList.remove("showing-panel");
});
form.addEventListener("input", remember);
form.addEventListener("submit", (event) => event.preventDefault());

const theme = localStorage.getItem("llmpy-theme");
useTheme(THEMES.includes(theme) ? theme : "auto");
recall();
chat.drawEmpty();
chat.recall();
draw();
look();
question.focus();
