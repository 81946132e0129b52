// --- the stages of the chosen head and token, read from whole numbers --------------------------------------------------

const wholes = new Map();
const wholeRow = (name, kind, query) => {
  const { unit, cells } = data.stages[name][kind];
  const key = `${name} ${kind}`;
  if (!wholes.has(key)) wholes.set(key, unpacked(cells, Int16Array));
  return Array.from(wholes.get(key).subarray(query * n, query * n + n), (whole) => (whole === -32768 ? null : whole * unit));
};
const stagesOf = (layer, head, query) => {
  const name = headName(layer, head);
  const kept = data.stages[name];
  if (!kept) return null;
  const [products, weighted] = [wholeRow(name, "products", query), wholeRow(name, "weighted", query)];
  const factor = kept.factor[query];
  const scaled = products.map((x) => x * factor);
  const scores = kept.scores ? wholeRow(name, "scores", query) : scaled.map((x, key) => (key > query ? null : x));
  return { products, factor, scaled, scores, pattern: data.names.map((_, key) => weight(layer, head, query, key)), weighted };
};
const showStages = () => {
  const { query } = chosenCell();
  const found = looks(state.layer) ? stagesOf(state.layer, state.head, query) : null;
  one("#stages-name").textContent = `${headName(state.layer, state.head)} step by step, from ${data.names[query]} (${query})`;
  one("#stages-none").hidden = Boolean(found);
  one("#stages-table").hidden = !found;
  if (found) drawStages(one("#stages-table"), data.names, query, found);
};
if (data.stages) views.push(showStages);
