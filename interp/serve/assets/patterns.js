// --- the chosen head's pattern, clean and edited -------------------------------------------------------------------

const canvases = all("#patterns canvas");
const frames = new Map();

const drawOne = (canvas) => {
  const found = shown?.pattern;
  const figure = canvas.parentElement;
  if (!found || !figure.clientWidth) return;
  const rows = found[canvas.dataset.run];
  const n = rows.length;
  const context = canvas.getContext("2d");
  const font = `11px ${style("--mono")}`;
  context.font = font;
  const longest = Math.max(...shown.tokens.map((name) => context.measureText(name).width));
  const margin = Math.ceil(Math.min(longest, 80)) + 10;
  const cell = Math.max(2, Math.min(26, Math.floor((figure.clientWidth - margin - 2) / n)));
  const side = cell * n;
  const dense = window.devicePixelRatio || 1;
  const [width, height] = [margin + side + 2, side + margin + 8];
  [canvas.width, canvas.height] = [Math.round(width * dense), Math.round(height * dense)];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  frames.set(canvas, { margin, top: 6, cell, n });
  context.scale(dense, dense);
  context.font = font;
  context.textBaseline = "middle";
  context.textAlign = "right";
  context.translate(margin, 6);
  const gap = cell >= 8 ? 1 : 0;
  rows.forEach((row, q) => row.forEach((value, k) => {
    context.fillStyle = `rgb(${colour(Math.min(1, Math.max(0, value)))})`;
    context.fillRect(k * cell, q * cell, cell - gap, cell - gap);
  }));
  const every = Math.ceil(12 / cell);
  for (let i = 0; i < n; i += every) {
    const middle = (i + 0.5) * cell;
    context.fillStyle = i === shown.position ? style("--ink") : style("--muted");
    context.fillText(shown.tokens[i], -6, middle, margin - 8);
    context.save();
    context.translate(middle, side + 6);
    context.rotate(-Math.PI / 2);
    context.fillText(shown.tokens[i], 0, 0, margin - 8);
    context.restore();
  }
  markEdges(context, canvas, cell);
};

const markEdges = (context, canvas, cell) => {
  if (state.pointed) {
    context.strokeStyle = style("--ink");
    context.strokeRect(state.pointed.key * cell - 0.5, state.pointed.query * cell - 0.5, cell, cell);
  }
  if (canvas.dataset.run !== "edited") return;
  context.strokeStyle = style("--accent");
  context.lineWidth = 2;
  for (const edit of edits()) {
    const { layer, head, kind } = partOf(edit);
    if (kind === "head" || layer !== state.layer || head !== state.head) continue;
    const { query, key } = edit.at;
    const [x, y] = [key * cell, query * cell];
    context.strokeRect(x, y, cell - 1, cell - 1);
    context.beginPath();
    context.moveTo(x, y);
    context.lineTo(x + cell - 1, y + cell - 1);
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
    const row = found.clean[shown.position];
    [one("#query").value, one("#key").value] = [shown.position, row.indexOf(Math.max(...row))];
  }
  const { query, key } = state.pointed ?? { query: +one("#query").value, key: +one("#key").value };
  const [a, b] = ["clean", "edited"].map((run) => found[run][query]?.[key]);
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
  const { margin, top, cell, n } = frames.get(canvas);
  const box = canvas.getBoundingClientRect();
  const key = Math.floor((event.clientX - box.left - margin) / cell);
  const query = Math.floor((event.clientY - box.top - top) / cell);
  return key >= 0 && query >= 0 && query < n && key <= query ? { query, key } : null;
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
