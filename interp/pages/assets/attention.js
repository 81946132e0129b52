// --- attention weights: the lower triangle of every head, row by row, as unsigned integers -------------------------

const fine = data.attention?.bytes === 2;
const cells = data.attention && unpacked(data.attention.cells, fine ? Uint16Array : Uint8Array);
const [most, digits] = fine ? [65535, 4] : [255, 2];
const triangle = (n * (n + 1)) / 2;
// Layers that mix positions without attention have no weights.
const looks = (layer) => data.attention.layers.includes(layer);
const weight = (layer, head, query, key) => {
  const place = data.attention.layers.indexOf(layer);
  return key > query || place < 0 ? 0 : cells[(place * data.heads + head) * triangle + (query * (query + 1)) / 2 + key] / most;
};

// What a head takes from a key: attention, or attention times the length of the value after W_O (Kobayashi et al. 2020).
const lengths = data.values && unpacked(data.values.cells, Uint16Array);
const strength = (layer, head, query, key) =>
  weight(layer, head, query, key) *
  (state.weighting === "value" ? (lengths[(layer * data.heads + head) * n + key] / 65535) * data.values.most : 1);
const strongest = (layer, head) => {
  if (state.weighting !== "value") return 1;
  let most = 0;
  for (let query = 0; query < n; query++) {
    for (let key = 0; key <= query; key++) most = Math.max(most, strength(layer, head, query, key));
  }
  return most || 1;
};

// --- thumbnails ----------------------------------------------------------------------------------------------------

const drawThumbnail = (context, layer, head) => {
  const image = context.createImageData(n, n);
  for (let query = 0; query < n; query++) {
    for (let key = 0; key <= query; key++) {
      image.data.set([...colour(weight(layer, head, query, key)), 255], 4 * (query * n + key));
    }
  }
  context.putImageData(image, 0, 0);
};
const drawThumbnails = () => {
  for (const button of all(".thumb")) {
    const [layer, head] = [+button.dataset.layer, +button.dataset.head];
    drawThumbnail(one("canvas", button).getContext("2d"), layer, head);
  }
};

// --- the large pattern ---------------------------------------------------------------------------------------------

const canvas = one("#pattern");
const frame = { margin: 0, top: 6, cell: 1 };

const measureFrame = (context) => {
  const longest = Math.max(...data.names.map((name) => context.measureText(name).width));
  frame.margin = Math.ceil(Math.min(longest, 110)) + 10;
  const room = canvas.parentElement.clientWidth - frame.margin - 2;
  frame.cell = Math.max(2, Math.min(30, Math.floor(room / n)));
  return frame.cell * n;
};

const drawLabels = (context, query) => {
  const every = Math.ceil(12 / frame.cell);
  const side = frame.cell * n;
  for (let i = 0; i < n; i++) {
    if (i % every && i !== query && i !== state.key) continue;
    const middle = (i + 0.5) * frame.cell;
    context.fillStyle = i === query || i === state.key ? style("--ink") : style("--muted");
    context.textAlign = "right";
    if (i !== state.key || i === query || !(i % every)) context.fillText(data.names[i], -6, middle, frame.margin - 8);
    context.save();
    context.translate(middle, side + 6);
    context.rotate(-Math.PI / 2);
    context.fillText(data.names[i], 0, 0, frame.margin - 8);
    context.restore();
  }
};

const drawPattern = () => {
  const context = canvas.getContext("2d");
  const font = `11px ${style("--mono")}`;
  context.font = font;
  const side = measureFrame(context);
  const dense = window.devicePixelRatio || 1;
  const [width, height] = [frame.margin + side + 2, frame.top + side + frame.margin];
  [canvas.width, canvas.height] = [Math.round(width * dense), Math.round(height * dense)];
  [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
  Object.assign(canvas.dataset, frame);
  context.scale(dense, dense);
  context.font = font;
  context.textBaseline = "middle";
  context.translate(frame.margin, frame.top);
  const gap = frame.cell >= 8 ? 1 : 0;
  const full = strongest(state.layer, state.head);
  for (let q = 0; q < n; q++) {
    for (let k = 0; k <= q; k++) {
      context.fillStyle = `rgb(${colour(strength(state.layer, state.head, q, k) / full)})`;
      context.fillRect(k * frame.cell, q * frame.cell, frame.cell - gap, frame.cell - gap);
    }
  }
  const query = state.pointed ?? state.pos;
  context.strokeStyle = style("--ink");
  context.lineWidth = 1.25;
  if (state.direction === "from") {
    context.strokeRect(-0.5, query * frame.cell - 0.5, (query + 1) * frame.cell, frame.cell);
  } else {
    context.strokeRect(query * frame.cell - 0.5, query * frame.cell - 0.5, frame.cell, (n - query) * frame.cell);
  }
  if (data.reasons) {
    const cell = chosenCell();
    context.strokeStyle = style("--pos");
    context.lineWidth = 2;
    context.strokeRect(cell.key * frame.cell - 0.5, cell.query * frame.cell - 0.5, frame.cell, frame.cell);
  }
  drawLabels(context, query);
};

const under = (event) => {
  const box = canvas.getBoundingClientRect();
  const key = Math.floor((event.clientX - box.left - frame.margin) / frame.cell);
  const query = Math.floor((event.clientY - box.top - frame.top) / frame.cell);
  return key >= 0 && key <= query && query < n ? { query, key } : null;
};
if (data.attention) {
  canvas.addEventListener("pointermove", (event) => {
    const cell = under(event);
    if (!cell) return select({ pointed: null, key: null });
    const [pointed, key] = state.direction === "from" ? [cell.query, cell.key] : [cell.key, cell.query];
    if (pointed !== state.pointed || key !== state.key) select({ pointed, key });
  });
  canvas.addEventListener("pointerleave", () => select({ pointed: null, key: null }));
  canvas.addEventListener("click", () => state.pointed !== null && select({ pos: state.pointed, cell: state.direction === "from"
    ? { query: state.pointed, key: state.key } : { query: state.key, key: state.pointed } }));

  drawings.push(drawThumbnails, drawPattern);
  new ResizeObserver(drawPattern).observe(one(".large"));
  one("#unscripted").remove();
}
