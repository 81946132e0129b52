// One state and the views that follow it. The scripts of a page are joined in one function, in the order of its list:
// whatever is named here is known to the others.

// The data of a report are deflated; those of the live page, which are few, are not.
const inflated = (text) => {
  const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"))).text();
};
const stored = document.getElementById("data");
const data = JSON.parse(stored.type === "application/json" ? stored.textContent : await inflated(stored.textContent));
const n = data.names.length;
const one = (selector, root = document) => root.querySelector(selector);
const all = (selector, root = document) => [...root.querySelectorAll(selector)];

// Rows of a table that open on demand stand deflated beside it.
for (const packed of all("script[data-rows]")) {
  const body = one("tbody", packed.parentElement);
  const rows = Object.assign(document.createElement("tbody"), { innerHTML: JSON.parse(await inflated(packed.textContent)) });
  for (const place of packed.dataset.rows.trim().split(" ")) body.insertBefore(rows.rows[0], body.rows[+place] ?? null);
  packed.remove();
}

const unpacked = (text, Kind) => new Kind(Uint8Array.from(atob(text), (c) => c.charCodeAt(0)).buffer);

const state = { layer: 0, head: 0, pos: n - 1, pointed: null, key: null, cell: null, direction: "from", part: null, edges: 0, weighting: "attention" };
const views = [];
const select = (change) => {
  Object.assign(state, change);
  views.forEach((view) => view());
};

// --- how parts and numbers are written ----------------------------------------------------------------------------------------

const headName = (layer, head) => `L${layer}H${head}`;
const number = (x, digits) => {
  const text = x.toFixed(digits);
  return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
};
const probability = (p) => (p > 0 && p < 0.0005 ? "<0.001" : number(p, 3));

// --- colours -------------------------------------------------------------------------------------------------------

const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
let ramp;
const readRamp = () => {
  const stops = [0, 1, 2].map((i) => style(`--ramp-${i}`).split(/\s+/).map(Number));
  ramp = Array.from({ length: 256 }, (_, i) => {
    const [a, b] = i < 128 ? [stops[0], stops[1]] : [stops[1], stops[2]];
    const t = (i < 128 ? i : i - 128) / (i < 128 ? 128 : 127);
    return a.map((x, c) => Math.round(x + (b[c] - x) * t));
  });
};
const colour = (value) => ramp[Math.round(255 * value)];

// From here on light text reads better than dark on every full colour: either has a contrast of 4.5 then.
const LIGHT_TEXT = 0.83;
const shade = (element, value) => {
  element.style.setProperty("--v", value.toFixed(3));
  element.classList.toggle("hi", value > LIGHT_TEXT);
};

// --- pictures, drawn anew when colours change ----------------------------------------------------------------------

const drawings = [];
const redraw = () => {
  readRamp();
  drawings.forEach((draw) => draw());
};
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
addEventListener("beforeprint", () => {
  document.documentElement.dataset.theme = "light";
  redraw();
});
addEventListener("afterprint", () => { delete document.documentElement.dataset.theme; redraw(); });
