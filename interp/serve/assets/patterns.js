// --- the chosen head's pattern, clean and edited -------------------------------------------------------------------

const canvases = all("#patterns canvas");
const frames = new Map();

// A pattern arrives as its rows one after the other, each up to the query itself.
const read = new WeakMap();
const weightsOf = (run) => {
  const found = shown.pattern;
  if (!read.has(found)) read.set(found, Object.fromEntries(["clean", "edited"].map((name) => [name, unpacked(found[name], Float32Array)])));
  return read.get(found)[run];
};
const weightOf = (run, query, key) => (key <= query && query < shown.tokens.length ? weightsOf(run)[query * (query + 1) / 2 + key] : undefined);

// Where tokens are too many for a square each, a square stands for a block of them and shows its largest weight.
const gridOf = (n, width) => {
  const cell = Math.floor(width / n);
  return cell >= 2 ? { block: 1, cell: Math.min(26, cell) } : { block: Math.ceil(2 * n / width), cell: 2 };
};
const strongestIn = (run, block, across, down) => {
  let best = null;
  const n = shown.tokens.length;
  for (let query = down * block; query < Math.min(n, (down + 1) * block); query++) {
    for (let key = across * block; key <= Math.min(query, (across + 1) * block - 1); key++) {
      const weight = weightOf(run, query, key);
      if (best === null || weight > best.weight) best = { query, key, weight };
    }
  }
  return best;
};
const paintings = new Map();
const painting = (run, { block, cell }, dense) => {
  const kept = paintings.get(run);
  const size = `${block} ${cell} ${dense} ${ramp[255]}`;
  if (kept?.found === shown.pattern && kept.size === size) return kept.canvas;
  const squares = Math.ceil(shown.tokens.length / block);
  const canvas = Object.assign(document.createElement("canvas"), { width: squares * cell * dense, height: squares * cell * dense });
  const context = canvas.getContext("2d");
  context.scale(dense, dense);
  const gap = cell >= 8 ? 1 : 0;
  for (let down = 0; down < squares; down++) {
    for (let across = 0; across <= down; across++) {
      const { weight } = strongestIn(run, block, across, down);
      context.fillStyle = `rgb(${colour(Math.min(1, Math.max(0, weight)))})`;
      context.fillRect(across * cell, down * cell, cell - gap, cell - gap);
    }
  }
  paintings.set(run, { found: shown.pattern, size, canvas });
  return canvas;
};

const drawOne = (canvas) => {
  const figure = canvas.parentElement;
  if (!shown?.pattern || !figure.clientWidth) return;
  const n = shown.tokens.length;
  const context = canvas.getContext("2d");
  const font = `11px ${style("--mono")}`;
  context.font = font;
  const longest = Math.max(...shown.tokens.map((name) => context.measureText(name).width));
  const margin = Math.ceil(Math.min(longest, 80)) + 10;
  const grid = gridOf(n, figure.clientWidth - margin - 2);
  const { block, cell } = grid;
  const side = cell * Math.ceil(n / block);
  const dense = window.devicePixelRatio || 1;
  const [width, height] = [margin + side + 2, side + margin + 8];
  [canvas.width, canvas.height] = [Math.round(width * dense), Math.round(height * dense)];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  frames.set(canvas, { margin, top: 6, ...grid });
  context.scale(dense, dense);
  context.font = font;
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.translate(margin, 6);
  context.drawImage(painting(canvas.dataset.run, grid, dense), 0, 0, side, side);
  const every = Math.ceil(12 * block / cell);
  for (let i = 0; i < n; i += every) {
    const middle = (i + 0.5) / block * cell;
    context.fillStyle = i === shown.position ? style("--ink") : style("--muted");
    context.fillText(shown.tokens[i], -6, middle, margin - 8);
    context.save();
    context.translate(middle, side + 6);
    context.rotate(-Math.PI / 2);
    context.fillText(shown.tokens[i], 0, 0, margin - 8);
    context.restore();
  }
  markEdges(context, canvas, grid);
};

const markEdges = (context, canvas, { block, cell }) => {
  const side = Math.max(cell, 8);  // small squares get a mark around them
  const corner = ({ query, key }) => [key, query].map((i) => Math.floor(i / block) * cell - (side - cell) / 2);
  if (state.pointed) {
    const [x, y] = corner(state.pointed);
    context.strokeStyle = style("--ink");
    context.strokeRect(x - 0.5, y - 0.5, side, side);
  }
  if (canvas.dataset.run !== "edited") return;
  context.strokeStyle = style("--accent");
  context.lineWidth = 2;
  for (const edit of edits()) {
    const { layer, head, kind } = partOf(edit);
    if (kind === "head" || layer !== state.layer || head !== state.head) continue;
    const [x, y] = corner(edit.at);
    context.strokeRect(x, y, side - 1, side - 1);
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x + side - 1, y + side - 1);
    context.stroke();
  }
};

const drawPatterns = () => canvases.forEach(drawOne);
const showPatterns = () => {
  const head = state.part === "head";
  one("#patterns").hidden = one("#edge").hidden = !head || !shown.pattern;
  one("#no-pattern").hidden = !head || Boolean(shown.pattern);
  if (state.pointed && state.pointed.query >= shown.tokens.length) state.pointed = null;
  drawPatterns();
  readOut();
};
const readOut = () => {
  const found = shown?.pattern;
  if (!found) return;
  const last = shown.tokens.length - 1;
  one("#query").max = one("#key").max = last;
  // Until an edge is named: where the token looked at looks most.
  if (!state.named) {
    const first = shown.position * (shown.position + 1) / 2;
    const row = weightsOf("clean").subarray(first, first + shown.position + 1);
    [one("#query").value, one("#key").value] = [shown.position, row.indexOf(row.reduce((a, b) => Math.max(a, b)))];
  }
  const { query, key } = state.pointed ?? { query: +one("#query").value, key: +one("#key").value };
  const [a, b] = ["clean", "edited"].map((run) => weightOf(run, query, key));
  one("#readout").textContent = a === undefined ? "No such edge: the key stands after the query, or the prompt is shorter."
    : `${shown.tokens[query]} (${query}) looks at ${shown.tokens[key]} (${key}): clean ${number(a, 4)}, edited ${number(b, 4)}`;
  one("#cut").textContent = has(edge(query, key)) ? "Restore this edge" : "Cut this edge";
  one("#cut").disabled = a === undefined;
  one("#renormalise").disabled = !found.scored;
};

// In the scores, before the softmax, the rest of the row is renormalised; in the pattern it is not.
const edge = (query, key) => ({
  where: `L${state.layer}.${one("#renormalise").checked && shown.pattern?.scored ? "attn_scores" : "pattern"}`,
  change: "set", values: one("#renormalise").checked && shown.pattern?.scored ? "-inf" : 0,
  at: { head: state.head, query, key },
});
const toggleEdge = (query, key) => (has(edge(query, key)) ? drop(edge(query, key)) : put(edge(query, key)));
const under = (canvas, event) => {
  const { margin, top, cell, block } = frames.get(canvas);
  const box = canvas.getBoundingClientRect();
  const across = Math.floor((event.clientX - box.left - margin) / cell);
  const down = Math.floor((event.clientY - box.top - top) / cell);
  return across >= 0 && down >= 0 && across <= down ? strongestIn(canvas.dataset.run, block, across, down) : null;
};
for (const canvas of canvases) {
  canvas.addEventListener("pointermove", (event) => {
    const cell = under(canvas, event);
    if (cell?.query === state.pointed?.query && cell?.key === state.pointed?.key) return;
    state.pointed = cell;
    drawPatterns();
    readOut();
  });
  canvas.addEventListener("pointerleave", () => { state.pointed = null; drawPatterns(); readOut(); });
  canvas.addEventListener("click", (event) => {
    const cell = under(canvas, event);
    if (!cell) return;
    state.named = true;
    [one("#query").value, one("#key").value] = [cell.query, cell.key];
    toggleEdge(cell.query, cell.key);
  });
}
one("#cut").addEventListener("click", () => toggleEdge(+one("#query").value, +one("#key").value));
for (const id of ["#query", "#key"]) one(id).addEventListener("input", () => { Object.assign(state, { pointed: null, named: true }); readOut(); });

views.push(showPatterns);
drawings.push(drawPatterns);
new ResizeObserver(drawPatterns).observe(one("#patterns"));
