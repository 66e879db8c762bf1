// Lines over the last two minutes, from the server's own counters.

import { look } from "./api.js";
import { make } from "./dom.js";

const KEPT = 120; // samples, one a second
const WIDTH = 300;
const HEIGHT = 44;
const SVG = "http://www.w3.org/2000/svg";

class Plot {
  // title; format of a value; names of one or two lines; most: a fixed top of the scale.
  constructor(title, format, names, most) {
    Object.assign(this, { format, most, lines: names.map(() => []) });
    this.value = make("output", {});
    this.top = make("span", { class: "most" });
    const legend = names.length > 1 ? names.map((name, i) => make("span", { class: i ? "second" : "first" }, name)) : [];
    this.svg = document.createElementNS(SVG, "svg");
    this.svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
    this.svg.setAttribute("preserveAspectRatio", "none");
    this.svg.setAttribute("role", "img");
    this.svg.setAttribute("aria-label", title);
    this.area = this.path("area");
    this.paths = names.map((_, i) => this.path(i ? "second" : ""));
    this.cursor = this.path("cursor");
    this.svg.addEventListener("pointermove", (event) => this.point(event.offsetX / this.svg.clientWidth));
    this.svg.addEventListener("pointerleave", () => this.point(undefined));
    this.element = make("div", { class: "plot" }, make("header", {}, make("span", {}, title), ...legend, this.value),
      make("div", { class: "frame" }, this.svg, this.top));
    this.draw();
  }

  path(kind) {
    const path = document.createElementNS(SVG, "path");
    if (kind) path.setAttribute("class", kind);
    this.svg.append(path);
    return path;
  }

  // One value a line; null where there is none.
  add(values) {
    this.lines.forEach((line, i) => {
      line.push(values[i] ?? null);
      if (line.length > KEPT) line.shift();
    });
    this.draw();
  }

  draw() {
    const highest = Math.max(0, ...this.lines.flat().filter((value) => value !== null));
    const most = this.most ?? nice(highest);
    const x = (i, line) => WIDTH * (1 - (line.length - 1 - i) / (KEPT - 1));
    const y = (value) => HEIGHT - 2 - (HEIGHT - 6) * (value / most);
    this.lines.forEach((line, n) => this.paths[n].setAttribute("d", outline(line, x, y)));
    const first = this.lines[0];
    const begin = first.findIndex((value) => value !== null);
    const filled = begin >= 0 && !first.slice(begin).includes(null);
    this.area.setAttribute("d", filled ? `${outline(first, x, y)}V${HEIGHT}H${x(begin, first)}Z` : "");
    this.top.textContent = this.format(most);
    this.tell();
  }

  point(share) {
    this.share = share;
    this.tell();
  }

  // The latest values, or those under the pointer.
  tell() {
    const length = this.lines[0].length;
    const pointed = this.share === undefined ? -1 : length - 1 - Math.round((1 - this.share) * (KEPT - 1));
    const index = pointed >= 0 ? pointed : length - 1;
    this.cursor.setAttribute("d", pointed >= 0 ? `M${WIDTH * this.share} 0V${HEIGHT}` : "");
    const values = this.lines.map((line) => line[index]).filter((value) => value !== null && value !== undefined);
    const when = pointed >= 0 ? ` · ${length - 1 - pointed} s ago` : "";
    this.value.textContent = values.length ? values.map(this.format).join(" / ") + when : "–";
  }
}

function outline(line, x, y) {
  let pen = "M";
  let path = "";
  line.forEach((value, i) => {
    if (value === null) pen = "M";
    else {
      path += `${pen}${x(i, line).toFixed(1)} ${y(value).toFixed(1)}`;
      pen = "L";
    }
  });
  return path;
}

// The next of 1, 2, 5, 10, 20, ...
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

// Values by name, labels left out; those of one name are added up.
function parsed(text) {
  const values = {};
  for (const line of text.split("\n")) {
    const found = /^llmpy:(\w+)(?:\{.*\})? (\S+)$/.exec(line);
    if (found) values[found[1]] = (values[found[1]] ?? 0) + Number(found[2]);
  }
  return values;
}

const count = (value) => value.toLocaleString("en", { maximumFractionDigits: value < 10 ? 1 : 0 });
const share = (value) => `${(100 * value).toFixed(value > 0 && value < 0.1 ? 1 : 0)} %`;

export class Gauges {
  constructor(host) {
    this.plots = {
      speed: new Plot("Tokens/s", count, ["written", "read"]),
      queue: new Plot("Requests", count, ["running", "waiting"]),
      cache: new Plot("Cache in use", share, ["share"], 1),
      hits: new Plot("Prompt tokens found in the cache", share, ["share"], 1),
    };
    host.append(...Object.values(this.plots).map((plot) => plot.element));
  }

  // One look at the server; raises where it cannot be reached.
  async look() {
    try {
      this.take(parsed(await look("metrics")), performance.now() / 1000);
    } catch (error) {
      this.last = undefined;
      for (const plot of Object.values(this.plots)) plot.add([null, null]);
      throw error;
    }
  }

  take(now, time) {
    const before = this.last ?? { ...now, time: time - 1 };
    const gone = (name) => Math.max(0, (now[name] ?? 0) - (before[name] ?? 0));
    const seconds = Math.max(time - before.time, 0.1);
    const cached = gone("prefix_cache_hits_total");
    const looked = gone("prefix_cache_queries_total");
    this.speed = gone("generation_tokens_total") / seconds;
    this.running = now.num_requests_running;
    this.plots.speed.add([this.speed, Math.max(0, gone("prompt_tokens_total") - cached) / seconds]);
    this.plots.queue.add([now.num_requests_running, now.num_requests_waiting]);
    this.plots.cache.add([now.kv_cache_usage_perc]);
    this.hitShare = looked ? cached / looked : (this.hitShare ?? null);
    this.plots.hits.add([this.hitShare]);
    this.last = { ...now, time };
  }
}
