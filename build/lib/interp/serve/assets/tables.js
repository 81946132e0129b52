// --- tokens, next tokens, maps and neurons -------------------------------------------------------------------------

const make = (tag, text = "", classes = "") =>
  Object.assign(document.createElement(tag), { textContent: text, className: classes });
const signed = (x, digits) => (Number(x.toFixed(digits)) > 0 ? "+" : "") + number(x, digits);
const chip = (name, pos, pressed) => {
  const button = Object.assign(make("button", "", "chip"), { type: "button" });
  button.append(make("bdi", name), make("small", String(pos)));
  button.dataset.pos = pos;
  button.classList.toggle("chosen", pressed);
  button.setAttribute("aria-pressed", pressed);
  return button;
};
// Fresh elements, but the focus stays where it was.
const renew = (parent, children) => {
  const at = [...parent.children].indexOf(document.activeElement);
  parent.replaceChildren(...children);
  if (at >= 0) parent.children[at]?.focus();
};

const showTokens = () => {
  renew(one("#tokens"), shown.tokens.map((name, pos) => chip(name, pos, pos === shown.position)));
  const second = shown.second ?? [];
  renew(one("#second-tokens"), second.map((name, pos) => {
    const span = make("span", "", "chip");
    span.append(make("bdi", name), make("small", String(pos)));
    span.classList.toggle("pointed", name !== shown.tokens[pos]);
    return span;
  }));
  const [a, b] = [shown.tokens.length, second.length];
  one("#lengths").textContent = !b ? "" : a === b
    ? "Framed: where it differs from the prompt. Both have as many tokens."
    : `Framed: where it differs from the prompt. It has ${b} tokens, the prompt ${a}: patches need chosen positions.`;
};

const showNext = () => {
  one("#after").textContent = `${shown.tokens[shown.position]} (${shown.position})`;
  one("#kl").textContent = shown.edits.length
    ? `The two distributions are ${number(shown.kl, 4)} nats apart (Kullback–Leibler, edited from clean).` : "";
  renew(one("#next-tokens tbody"), shown.next.map(({ id, token, clean, edited }) => {
    const row = document.createElement("tr");
    const button = Object.assign(make("button", token, "link tok"), { type: "button" });
    button.dataset.id = id;
    const head = make("th", "", "tok");
    head.scope = "row";
    head.append(button);
    const change = make("td", edited === clean ? "" : signed(edited - clean, 3));
    const bars = make("td", "", "pairs");
    for (const value of [clean, edited]) {
      const bar = document.createElement("i");
      bar.style.width = `${100 * value}%`;
      bars.append(bar);
    }
    row.append(head, make("td", probability(clean)), make("td", probability(edited)), change, bars);
    row.classList.toggle("chosen", id === shown.answer.id);
    return row;
  }));
};

const touched = (layer, head) => edits().map(partOf).some((part) => part.layer === layer && (head === undefined
  ? part.kind === "mlp" || part.kind === "neuron" : part.head === head));

const valuesOf = (run) => {
  const kind = run ? one("input[name=shown]:checked").value : "clean";
  const cells = shown.attribution.cells;
  if (kind === "moved") return { kind, of: (layer, column) => shown.moved[layer]?.[column] };
  if (!cells) return { kind, of: () => undefined };
  if (kind !== "change") return { kind, of: (layer, column) => cells[run][layer][column] };
  return { kind, of: (layer, column) => cells[1][layer][column] - cells[0][layer][column] };
};

const showMap = (run) => {
  const { kind, of } = valuesOf(run);
  const table = one(`#map-${run}`);
  const buttons = all(".cell", table);
  const values = buttons.map((cell) => of(+cell.dataset.layer, +(cell.dataset.head ?? cell.dataset.column)));
  const both = shown.attribution.cells?.flat(2) ?? [];
  const known = kind === "clean" || kind === "edited" ? both : values.filter((x) => x !== undefined);
  const reach = kind === "moved" ? 1 : Math.max(1e-9, ...known.map(Math.abs));
  const scale = table.closest("div:not(.scroll)");
  scale.classList.toggle("seq", kind === "moved");
  buttons.forEach((cell, i) => {
    const value = values[i];
    const { layer, head } = cell.dataset;
    cell.textContent = value === undefined ? "–" : kind === "moved" ? number(value, 2) : signed(value, 2);
    shade(cell, Math.min(1, Math.abs(value ?? 0) / reach));
    cell.classList.toggle("neg", value < 0);
    cell.classList.toggle("idle", value === undefined);
    cell.classList.toggle("touched", run === 1 && touched(+layer, head === undefined ? undefined : +head));
    const chosen = +layer === state.layer && (head === undefined ? state.part !== "head" : state.part === "head" && +head === state.head);
    cell.classList.toggle("chosen", chosen);
    cell.setAttribute("aria-pressed", chosen);
    cell.dataset.tip = told(layer, head, cell.dataset.column);
  });
  const [low, high] = kind === "moved" ? ["0", "1"] : [number(-reach, 2), `+${number(reach, 2)}`];
  one(`#low-${run}`).textContent = low;
  one(`#high-${run}`).textContent = high;
  if (!run) return;
  one("#scale-1").className = kind === "moved" ? "scale seq" : "scale div";
  one("#unit-1").textContent = {
    edited: "logits", change: "logits, edited minus clean",
    moved: "share of each query's attention that went elsewhere, mean over queries",
  }[kind];
};

const told = (layer, head, column) => {
  const lines = [head === undefined ? names.mlp(layer) : names.head(layer, head)];
  const cells = shown.attribution.cells;
  if (cells) {
    const [a, b] = [0, 1].map((run) => cells[run][layer][head ?? column]);
    lines.push(`clean ${signed(a, 3)} logits`, `edited ${signed(b, 3)} logits`);
  }
  const moved = head === undefined ? undefined : shown.moved[layer]?.[head];
  if (moved !== undefined && shown.edits.length) lines.push(`attention moved ${number(moved, 3)}`);
  return lines.join("\n");
};

const showMaps = () => {
  one("#answer").textContent = shown.answer.token;
  one("#contrast").textContent = shown.wrong ? ` minus those to ${shown.wrong.token}` : "";
  const { why, total, rest } = shown.attribution;
  one("#rest").textContent = rest
    ? `Not in the maps: embeddings, biases and other parts, ${signed(rest[0], 2)} in the clean run, ${signed(rest[1], 2)} in the edited one; with them each map sums to its logit.` : "";
  one("#why").hidden = !why;
  one("#why").textContent = why ?? "";
  total.forEach((value, run) => { one(`#total-${run}`).textContent = number(value, 3); });
  showMap(0);
  showMap(1);
};

const showNeurons = () => {
  const there = state.part !== "head" && shown.neurons;
  one("#neurons").hidden = one("#any-neuron").hidden = !there;
  if (!there) return;
  const write = (x) => (x === null ? "–" : signed(x, 3));
  renew(one("#neurons tbody"), shown.neurons.rows.map(({ neuron, active, added }) => {
    const row = document.createElement("tr");
    const head = make("th");
    head.scope = "row";
    const button = Object.assign(make("button", names.neuron(shown.neurons.layer, neuron), "link"), { type: "button" });
    button.dataset.neuron = neuron;
    head.append(button);
    row.append(head, ...[...active, ...added].map((x) => make("td", write(x))));
    row.classList.toggle("chosen", state.part === "neuron" && state.neuron === neuron);
    return row;
  }));
};

// The table is made anew only for other tokens.
let streamOf = "";
const showStream = () => {
  const [table, second] = [one("#stream-map"), shown.second];
  table.hidden = !second;
  one("#no-second").hidden = Boolean(second);
  const tokens = second ? shown.tokens.slice(0, second.length) : [];
  if (streamOf !== tokens.join("\n")) makeStream(table, tokens);
  streamOf = tokens.join("\n");
  for (const button of all("[data-stream]", table)) {
    const put = Boolean(has(fromSecond(...button.dataset.stream.split(",").map(Number))));
    button.textContent = put ? "●" : "·";
    button.setAttribute("aria-pressed", put);
  }
};
const fromSecond = (layer, pos) => ({ where: names.stream(layer), change: "resample", at: { pos } });
const makeStream = (table, tokens) => {
  const top = document.createElement("tr");
  top.append(make("th", "stream"), ...tokens.map((token) => make("th", token)));
  one("thead", table).replaceChildren(top);
  one("tbody", table).replaceChildren(...Array.from({ length: data.layers }, (_, layer) => {
    const row = document.createElement("tr");
    row.append(make("th", names.stream(layer)), ...tokens.map((token, position) => {
      const cell = document.createElement("td");
      const button = Object.assign(make("button", "·", "spot"), { type: "button" });
      button.dataset.stream = `${layer},${position}`;
      button.setAttribute("aria-label", `${names.stream(layer)} at ${position}, ${token}`);
      cell.append(button);
      return cell;
    }));
    return row;
  }));
};

views.push(showTokens, showNext, showMaps, showNeurons, showStream);
