// --- one head in its stages: a row for each token it could look at, a column for each step ----------------------------

const STAGES = ["q · k", "scaled", "masked", "softmax", "× value"];
const signedTo = (x, digits) => (Number(x.toFixed(digits)) > 0 ? "+" : "") + number(x, digits);
const sumOf = (values) => values.reduce((a, b) => a + (b ?? 0), 0);

// Of many tokens those that the head takes most from, and the one that looks; the others are one row.
const MOST_KEYS = 40;
const keysOf = (query, found) => {
  const every = found.weighted.map((_, key) => key);
  if (every.length <= MOST_KEYS) return every;
  const order = every.slice(0, query).sort((a, b) => Math.abs(found.weighted[b]) - Math.abs(found.weighted[a]));
  return [...order.slice(0, MOST_KEYS - 1), query].sort((a, b) => a - b);
};

// found: { products, scaled, scores, pattern, weighted }, each with a number for every token, null where it is masked.
const drawStages = (table, names, query, found) => {
  const columns = [found.products, found.scaled, found.scores, found.pattern, found.weighted];
  const reach = columns.map((values) => Math.max(1e-9, ...values.map((x) => Math.abs(x ?? 0))));
  reach[1] = reach[2] = Math.max(reach[1], reach[2]);  // both are scores
  const made = (name, text, className = "") => Object.assign(document.createElement(name), { textContent: text, className });
  const head = document.createElement("tr");
  head.append(made("th", "token", "left"), ...STAGES.map((text, i) => made("th", i === 1 ? `× ${Number(found.factor.toPrecision(3))}` : text)));
  const keys = keysOf(query, found);
  const rows = keys.map((key) => {
    const row = document.createElement("tr");
    row.classList.toggle("chosen", key === query);
    const first = made("th", "", "tok");
    first.scope = "row";
    first.append(made("bdi", names[key]), made("small", ` ${key}`));
    const masked = found.scores[key] === null;
    row.classList.toggle("masked", masked);
    row.append(first, ...columns.map((values, i) => {
      const value = values[key];
      const cell = made("td", masked && i > 1 ? (i === 2 ? "−∞" : "–") : i === 3 ? number(value, 3) : signedTo(value, 2), "stage");
      if (masked && i > 1) return cell;
      shade(cell, i === 3 ? Math.min(1, value) : Math.min(1, Math.abs(value) / reach[i]));
      cell.classList.toggle("seq", i === 3);
      return cell;
    }));
    return row;
  });
  const others = names.length - keys.length;
  if (others) {
    const [pattern, weighted] = [found.pattern, found.weighted].map((values) => sumOf(values) - sumOf(keys.map((key) => values[key])));
    const row = made("tr", "", "others");
    row.append(made("th", `${others} others`), ...["", "", "", number(pattern, 3), signedTo(weighted, 2)].map((text) => made("td", text)));
    rows.push(row);
  }
  const foot = document.createElement("tr");
  foot.append(made("th", "sum"), ...["", "", "", number(sumOf(found.pattern), 3), signedTo(sumOf(found.weighted), 2)].map((text) => made("td", text)));
  const parts = ["thead", "tbody", "tfoot"].map((name) => document.createElement(name));
  parts[0].append(head);
  parts[1].append(...rows);
  parts[2].append(foot);
  table.replaceChildren(...parts);
};
