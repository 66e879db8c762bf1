// What the page asks of the server: JSON, and streams of it.

let key = sessionStorage.getItem("llmpy-key") ?? "";

export function useKey(given) {
  key = given;
  sessionStorage.setItem("llmpy-key", given);
}

export class Refusal extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function ask(path, options = {}) {
  const headers = {
    ...(key && { authorization: `Bearer ${key}` }),
    ...(options.body && { "content-type": "application/json" }),
    ...(options.isLook && { "x-llmpy-page": "1" }), // not worth a line of the server's log
  };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  const text = await answer.text();
  let message = text;
  try {
    message = JSON.parse(text).error.message;
  } catch {} // not in the protocol's shape: a proxy's words
  throw new Refusal(answer.status, message.slice(0, 2000) || `status ${answer.status}`);
}

export async function getJson(path) {
  return (await ask(path)).json();
}

// A text that is looked at again and again.
export async function look(path) {
  return (await ask(path, { isLook: true })).text();
}

// The objects of a streamed answer; begun(n): called first, with the messages that did not fit the context.
export async function* stream(path, body, signal, begun) {
  const answer = await ask(path, { method: "POST", body: JSON.stringify({ ...body, stream: true }), signal });
  begun(Number(answer.headers.get("x-llmpy-dropped-messages") ?? 0));
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) throw new Refusal(0, "the answer was cut off");
    const frames = (rest + value).split("\n\n");
    rest = frames.pop();
    for (const frame of frames) {
      if (!frame.startsWith("data: ")) continue; // a comment while nothing comes
      if (frame === "data: [DONE]") return;
      const made = JSON.parse(frame.slice(6));
      if (made.error) throw new Refusal(made.error.code, made.error.message);
      yield made;
    }
  }
}
