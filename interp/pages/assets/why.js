// --- why a head attends: the largest parts of one score, read from whole numbers --------------------------------------

const KEPT = 3;  // of each side, and of pairs
const reasons = new Map();
const reasonOf = (name, query, key) => {
  const found = data.reasons[name];
  if (!found) return null;
  if (!reasons.has(name)) {
    const cells = unpacked(found.cells, Int16Array);
    const rows = new Map();
    for (let at = 0; at < cells.length; at += found.width) rows.set(`${cells[at]} ${cells[at + 1]}`, cells.subarray(at, at + found.width));
    reasons.set(name, rows);
  }
  const row = reasons.get(name).get(`${query} ${key}`);
  if (!row) return null;
  const sides = Math.min(KEPT, found.query.length);
  const at = (start, count) => Array.from(row.subarray(start, start + count));
  const values = (start, count) => at(start, count).map((value) => value * found.unit);
  const named = (names, start, count) => at(start, count).map((i) => names[i]);
  const pairs = (found.width - 4 - 4 * sides) / 3;
  const last = 4 + 4 * sides;
  return {
    total: row[2] * found.unit,
    position: row[3] * found.unit,
    query: { names: named(found.query, 4, sides), values: values(4 + sides, sides) },
    key: { names: named(found.key, 4 + 2 * sides, sides), values: values(4 + 3 * sides, sides) },
    pair: {
      names: named(found.query, last, pairs).map((name, i) => `${name} × ${found.key[row[last + pairs + i]]}`),
      values: values(last + 2 * pairs, pairs),
    },
  };
};

// The cell that was chosen, or the strongest one of the chosen token.
const chosenCell = () => {
  if (state.cell) return state.cell;
  const from = state.direction === "from";
  const strengths = data.names.map((_, i) => (from ? weight(state.layer, state.head, state.pos, i) : weight(state.layer, state.head, i, state.pos)));
  const other = strengths.indexOf(Math.max(...strengths));
  return from ? { query: state.pos, key: other } : { query: other, key: state.pos };
};

const plus = (x) => (Number(x.toFixed(2)) > 0 ? "+" : "") + number(x, 2);

const showReasons = () => {
  const name = headName(state.layer, state.head);
  const { query, key } = chosenCell();
  const found = looks(state.layer) ? reasonOf(name, query, key) : null;
  one("#why-name").textContent = `Why ${name} looks from ${data.names[query]} (${query}) to ${data.names[key]} (${key})`;
  one("#why-parts").hidden = !found;
  one("#why-other").value = state.direction === "from" ? key : query;
  one("#why-score").textContent = found
    ? `score ${plus(found.total)}${found.position ? `, of which positions ${plus(found.position)}` : ""}`
    : looks(state.layer) && key <= query ? "The scores of this head are not split on this page." : "It does not see that token: there is no score.";
  if (!found) return;
  const sides = ["query", "key", "pair"];
  const reach = Math.max(...sides.flatMap((side) => found[side].values.map(Math.abs)), Math.abs(found.total)) || 1;
  for (const side of sides) {
    const { names, values } = found[side];
    const rest = found.total - found.position - values.reduce((a, b) => a + b, 0);
    const chips = [...names, "all others"].map((text, i) => {
      const value = i < values.length ? values[i] : rest;
      const chip = Object.assign(document.createElement("span"), { className: "chip" });
      chip.append(Object.assign(document.createElement("bdi"), { textContent: text }), Object.assign(document.createElement("small"), { textContent: plus(value) }));
      shade(chip, Math.min(1, Math.abs(value) / reach));
      chip.classList.toggle("neg", value < 0);
      return chip;
    });
    one(`#why-${side}`).replaceChildren(...chips);
  }
};
if (data.reasons) {
  views.push(showReasons);
  const pick = (cell) => select({ cell, pos: state.direction === "from" ? cell.query : cell.key });
  canvas.tabIndex = 0;
  canvas.addEventListener("keydown", (event) => {
    const { query, key } = chosenCell();
    const [up, down] = [Math.max(query - 1, 0), Math.min(query + 1, n - 1)];
    const next = {
      ArrowLeft: { query, key: Math.max(key - 1, 0) }, ArrowRight: { query, key: Math.min(key + 1, query) },
      ArrowUp: { query: up, key: Math.min(key, up) }, ArrowDown: { query: down, key },
    }[event.key];
    if (!next) return;
    event.preventDefault();
    pick(next);
  });
  one("#why-other").addEventListener("change", ({ target }) => {
    const other = +target.value;
    select({ cell: state.direction === "from" ? { query: state.pos, key: other } : { query: other, key: state.pos } });
  });
}
