// --- choosing heads and tokens -------------------------------------------------------------------------------------

const choosePart = (chosen) => {
  const { layer, head, part = headName(layer, head) } = chosen.dataset;
  const letGo = chosen.matches(".node") && state.pins.delete(part);
  if (chosen.matches(".node") && !letGo) state.pins.add(part);
  select({ ...(head && { layer: +layer, head: +head }), part: letGo ? null : part });
};
document.addEventListener("click", (event) => {
  const part = event.target.closest("button[data-head], [data-part]");
  if (part) choosePart(part);
  const token = event.target.closest(":is(.chip, .link, td)[data-pos]");
  if (token) select({ pos: +token.dataset.pos, cell: null });
});
for (const node of all(".node, .dot[data-part]")) {
  node.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    choosePart(node);
  });
}
for (const chip of all("#attended .chip")) {
  const point = () => select({ pointed: +chip.dataset.pos, key: null });
  const leave = () => select({ pointed: null, key: null });
  chip.addEventListener("pointerenter", point);
  chip.addEventListener("focus", point);
  chip.addEventListener("pointerleave", leave);
  chip.addEventListener("blur", leave);
}

const onChange = (name, act) =>
  all(`input[name=${name}]`).forEach((input) => input.addEventListener("change", () => act(input.value)));
onChange("direction", (direction) => select({ direction, pointed: null, key: null, cell: null }));
onChange("weighting", (weighting) => select({ weighting }));
const unfold = (section) => (rows) => all(`${section} tr.folded`).forEach((row) => { row.hidden = rows === "few"; });
onChange("depths", unfold("#lens"));
onChange("layers", unfold("#backward"));
onChange("edges", (edges) => select({ edges: +edges }));

for (const name of ["score", "circuit", "kind", "grain", "lens", "matrix", "patching", "ablation"]) {
  const show = (choice) => all(`[data-${name}]`).forEach((part) => { part.hidden = part.dataset[name] !== choice; });
  onChange(name, show);
  const first = one(`input[name=${name}]`);
  if (first) show(first.value);  // without a switch there is one choice, which stays
}

const orderParts = (order) => {
  const body = one("#parts tbody");
  const rows = all("tr", body).sort((a, b) =>
    order === "depth" ? a.dataset.order - b.dataset.order : Math.abs(b.dataset.value) - Math.abs(a.dataset.value));
  let sum = 0;
  const spans = rows.map((row) => [sum, (sum += +row.dataset.value)]);
  const low = Math.min(0, ...spans.flat());
  const width = Math.max(0, ...spans.flat()) - low || 1;
  const percent = (x) => `${(100 * (x - low)) / width}%`;
  rows.forEach((row, i) => {
    const [start, end] = spans[i];
    const cell = one(".fall", row);
    cell.style.setProperty("--zero", percent(0));
    cell.style.setProperty("--goal", percent(sum));
    Object.assign(one("i", cell).style, { left: percent(Math.min(start, end)), width: `${(100 * Math.abs(end - start)) / width}%` });
  });
  body.replaceChildren(...rows);
};
onChange("order", orderParts);
