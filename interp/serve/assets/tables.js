// --- tokens, next tokens, maps and neurons -------------------------------------------------------------------------

const make = (tag, text = "", classes = "") =>
  Object.assign(document.createElement(tag), { textContent: text, className: classes });
const signed = (x, digits) => (Number(x.toFixed(digits)) > 0 ? "+" : "") + number(x, digits);
const chip = (name, pos) => {
  const button = Object.assign(make("button", "", "chip"), { type: "button" });
  button.append(make("bdi", name), make("small", String(pos)));
  button.dataset.pos = pos;
  return button;
};
// Fresh elements, but the focus stays where it was.
const renew = (parent, children) => {
  const at = [...parent.children].indexOf(document.activeElement);
  parent.replaceChildren(...children);
  if (at >= 0) parent.children[at]?.focus();
};

// A strip of tokens is made anew only for other tokens; what is chosen stays in sight.
const strips = new WeakMap();
const inStrip = (strip, tokens, made) => {
  const written = tokens.join("\n");
  if (strips.get(strip) !== written) renew(strip, tokens.map(made));
  strips.set(strip, written);
  return [...strip.children];
};
const chips = (strip, tokens, pressed) => {
  let first = null;
  inStrip(strip, tokens, (name, pos) => chip(name, pos)).forEach((button, pos) => {
    button.classList.toggle("chosen", pressed(pos));
    button.setAttribute("aria-pressed", pressed(pos));
    if (pressed(pos)) first ??= button;
  });
  if (!first) return;
  const [inside, around] = [first, strip].map((element) => element.getBoundingClientRect());
  if (inside.top < around.top || inside.bottom > around.bottom) strip.scrollTop += inside.top - around.top - strip.clientHeight / 2;
};

// In a chat each token has the role that says it, written where another one begins to speak; an answer is marked.
const speak = (button, found, pos) => {
  const says = (at) => found.roles?.[at] ?? (at < found.prompt_length ? "" : "answer");
  button.dataset.role = found.roles?.[pos] ?? "";
  button.dataset.speaker = says(pos) !== (pos ? says(pos - 1) : "") ? says(pos) : "";
  button.title = button.dataset.role;
  button.classList.toggle("answers", pos >= found.prompt_length);
};

const showTokens = (found = shown) => {
  const position = found.position ?? state.at ?? found.prompt_length - 1;
  const follow = found.tokens.length - found.prompt_length;
  one("#follows").hidden = !follow;
  chips(one("#tokens"), found.tokens, (pos) => pos === position);
  [...one("#tokens").children].forEach((button, pos) => speak(button, found, pos));
  const second = found.second ?? [];
  inStrip(one("#second-tokens"), second, (name, pos) => {
    const span = make("span", "", "chip");
    span.append(make("bdi", name), make("small", String(pos)));
    return span;
  }).forEach((span, pos) => {
    span.classList.toggle("pointed", second[pos] !== found.tokens[pos]);
    span.classList.toggle("answers", pos >= second.length - follow);
  });
  const [a, b] = [found.prompt_length, second.length - follow];
  one("#lengths").textContent = b <= 0 ? "" : a === b
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

// An answer of several tokens: each after those before it, and all together, whose probability is often tiny.
const product = (p) => (p > 0 && p < 0.0005 ? p.toExponential(1).replace("-", "−") : number(p, 3));
const showWhole = () => {
  const table = one("#whole");
  const found = shown.whole;
  table.hidden = !found;
  if (!found) return;
  const write = (cells, [clean, edited], say, digits) => {
    const texts = [say(clean), say(edited), edited === clean ? "" : signed(edited - clean, digits)];
    cells.forEach((cell, i) => { cell.textContent = texts[i]; });
  };
  const log = (x) => number(x, 3);
  renew(one("tbody", table), found.tokens.map((token, step) => {
    const row = document.createElement("tr");
    const pos = shown.prompt_length - 1 + step;
    const button = Object.assign(make("button", token, "link tok"), { type: "button" });
    button.dataset.look = pos;
    const head = make("th", "", "tok");
    head.scope = "row";
    head.append(button);
    row.append(head, ...[0, 1, 2].map(() => make("td")));
    write(all("td", row), found.log_probs.map((run) => run[step]), log, 3);
    row.classList.toggle("chosen", pos === shown.position);
    return row;
  }));
  const [sum, whole] = all("tfoot tr", table).map((row) => all("td", row));
  write(sum, found.log_prob, log, 3);
  write(whole, found.probability, product, 3);
  if (Math.max(...found.probability) < 0.0005) whole[2].textContent = "";
};

const touched = (layer, head) => edits().map(partOf).some((part) => part.layer === layer && (head === undefined
  ? part.kind === "mlp" || part.kind === "neuron" : part.head === head));

// What a map shows: logits added, a score of the heads, or how far attention moved; null where there is none.
const valuesOf = (run) => {
  const kind = run ? one("input[name=shown]:checked").value : "clean";
  const score = one("#measure").value;
  if (kind === "moved") return { kind, share: true, of: (layer, column) => shown.moved?.[layer]?.[column] };
  const cells = score ? [0, 1].map((which) => shown.scores?.[score].map((layer) => layer?.[which] ?? []) ?? []) : shown.attribution.cells;
  const share = Boolean(score) && kind !== "change";
  if (!cells) return { kind, share, of: () => undefined };
  const at = (which, layer, column) => cells[which][layer]?.[column] ?? undefined;
  if (kind !== "change") return { kind, share, of: (layer, column) => at(run, layer, column) };
  return { kind, share, of: (layer, column) => at(1, layer, column) - at(0, layer, column) };
};
const missing = (x) => x === undefined || Number.isNaN(x);

const showMap = (run) => {
  const { kind, share, of } = valuesOf(run);
  const table = one(`#map-${run}`);
  const buttons = all(".cell", table);
  const values = buttons.map((cell) => of(+cell.dataset.layer, +(cell.dataset.head ?? cell.dataset.column)));
  const both = shown.attribution.cells?.flat(2) ?? [];
  const known = (kind === "clean" || kind === "edited") && !share ? both : values.filter((x) => !missing(x));
  const reach = share ? 1 : Math.max(1e-9, ...known.map(Math.abs));
  const scale = table.closest("div:not(.scroll)");
  scale.classList.toggle("seq", share);
  buttons.forEach((cell, i) => {
    const value = values[i];
    const { layer, head } = cell.dataset;
    cell.textContent = missing(value) ? "–" : share ? number(value, 2) : signed(value, 2);
    shade(cell, missing(value) ? 0 : Math.min(1, Math.abs(value) / reach));
    cell.classList.toggle("neg", value < 0);
    cell.classList.toggle("idle", missing(value));
    cell.classList.toggle("touched", run === 1 && touched(+layer, head === undefined ? undefined : +head));
    const chosen = +layer === state.layer && (head === undefined ? state.part !== "head" : state.part === "head" && +head === state.head);
    cell.classList.toggle("chosen", chosen);
    cell.setAttribute("aria-pressed", chosen);
    cell.dataset.tip = told(layer, head, cell.dataset.column);
  });
  const [low, high] = share ? ["0", "1"] : [number(-reach, 2), `+${number(reach, 2)}`];
  one(`#low-${run}`).textContent = low;
  one(`#high-${run}`).textContent = high;
  one(`#scale-${run}`).className = share ? "scale seq" : "scale div";
  const unit = one("#measure").value ? "attention mass" : "logits";
  one(`#unit-${run}`).textContent = kind === "moved" ? "share of each query's attention that went elsewhere, mean over queries"
    : kind === "change" ? `${unit}, edited minus clean` : unit;
};

const told = (layer, head, column) => {
  const lines = [head === undefined ? names.mlp(layer) : names.head(layer, head)];
  const cells = shown.attribution.cells;
  if (cells) {
    const [a, b] = [0, 1].map((run) => cells[run][layer][head ?? column]);
    lines.push(`clean ${signed(a, 3)} logits`, `edited ${signed(b, 3)} logits`);
  }
  if (head !== undefined) for (const [name, layers] of Object.entries(shown.scores ?? {})) {
    const pair = layers[layer]?.map((run) => run[head]);
    if (pair && pair[0] !== null) lines.push(`${name.replaceAll("_", " ")} ${pair.map((x) => number(x ?? 0, 2)).join(" → ")}`);
  }
  const moved = head === undefined ? undefined : shown.moved?.[layer]?.[head];
  if (moved !== undefined && shown.edits.length) lines.push(`attention moved ${number(moved, 3)}`);
  return lines.join("\n");
};

const showMaps = () => {
  const measure = one("#measure");
  one("#measured").hidden = Boolean(measure.value);
  one("#scored").hidden = !measure.value;
  one("#scored").textContent = measure.value ? `On this prompt: ${measure.selectedOptions[0].dataset.tip ?? measure.selectedOptions[0].title}.` : "";
  one("#answer").textContent = shown.answer.token;
  const step = Math.max(0, shown.position - shown.prompt_length + 1);
  one("#step").textContent = shown.whole ? ` (token ${step + 1} of the answer's ${shown.whole.ids.length})` : "";
  one("#answer-notes").hidden = !shown.notes.length;
  one("#answer-notes").textContent = shown.notes.map((said) => `${said[0].toUpperCase()}${said.slice(1)}.`).join(" ");
  one("#contrast").textContent = shown.wrong ? ` minus those to ${shown.wrong.token}` : "";
  const { why, total, rest, uncapped } = shown.attribution;
  const sums = uncapped ? `sums to its logit before the soft cap, ${uncapped.map((x) => signed(x, 2)).join(" and ")}` : "sums to its logit";
  one("#rest").textContent = rest
    ? `Not in the maps: embeddings, biases and other parts, ${signed(rest[0], 2)} in the clean run, ${signed(rest[1], 2)} in the edited one; with them each map ${sums}.` : "";
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

const showLens = () => {
  one("#lens-answer").textContent = shown.answer.token;
  renew(one("#lens-table tbody"), shown.lens.map(({ depth, runs }) => {
    const row = document.createElement("tr");
    const head = make("th", depth);
    head.scope = "row";
    row.append(head, ...runs.flatMap(({ token, top, answer }) => [make("td", token, "tok"), make("td", probability(top)), make("td", probability(answer))]));
    row.classList.toggle("differs", runs[0].token !== runs[1].token);
    return row;
  }));
};

const showSteps = () => {
  const found = state.part === "head" ? shown.stages : null;
  one("#steps").hidden = !found;
  if (!found) return;
  one("#steps-name").textContent = `${names.head(found.layer, found.head)} step by step, from ${shown.tokens[found.query]} (${found.query})`;
  for (const run of ["clean", "edited"]) drawStages(one(`#steps-${run}`), shown.tokens, found.query, found[run]);
};

// Of many tokens those where the prompts differ, with the one after each, those around the one looked at, and the last.
const MOST_STREAMS = 48;
const streamed = (tokens, second) => {
  const every = tokens.map((_, pos) => pos);
  if (every.length <= MOST_STREAMS) return every;
  const differ = every.filter((pos) => tokens[pos] !== second[pos]);
  const first = [every.length - 1, shown.position, ...differ, ...differ.map((pos) => pos + 1)];
  const around = [1, 2, 3].flatMap((step) => [shown.position - step, shown.position + step]);
  return [...new Set([...first, ...around].filter((pos) => pos in every))].slice(0, MOST_STREAMS).sort((a, b) => a - b);
};
// The table is made anew only for other tokens.
let streamOf = "";
const showStream = () => {
  const [table, second] = [one("#stream-map"), shown.second];
  table.hidden = !second;
  one("#no-second").hidden = Boolean(second);
  const tokens = second ? shown.tokens.slice(0, second.length) : [];
  const some = second ? streamed(tokens, second) : [];
  one("#some-streams").hidden = some.length === tokens.length;
  const named = some.map((pos) => `${tokens[pos]} ${pos}`).join("\n");
  if (streamOf !== named) makeStream(table, tokens, some);
  streamOf = named;
  for (const button of all("[data-stream]", table)) {
    const put = Boolean(has(fromSecond(...button.dataset.stream.split(",").map(Number))));
    button.textContent = put ? "●" : "·";
    button.setAttribute("aria-pressed", put);
  }
};
const fromSecond = (layer, pos) => ({ where: names.stream(layer), change: "resample", at: { pos } });
const makeStream = (table, tokens, some) => {
  const top = document.createElement("tr");
  const numbered = some.length < tokens.length;
  top.append(make("th", "stream"), ...some.map((pos) => make("th", numbered ? `${tokens[pos]} ${pos}` : tokens[pos])));
  one("thead", table).replaceChildren(top);
  one("tbody", table).replaceChildren(...Array.from({ length: data.layers }, (_, layer) => {
    const row = document.createElement("tr");
    row.append(make("th", names.stream(layer)), ...some.map((position) => {
      const cell = document.createElement("td");
      const button = Object.assign(make("button", "·", "spot"), { type: "button" });
      button.dataset.stream = `${layer},${position}`;
      button.setAttribute("aria-label", `${names.stream(layer)} at ${position}, ${tokens[position]}`);
      cell.append(button);
      return cell;
    }));
    return row;
  }));
};

early.push(showTokens);
views.push(() => showTokens(), showNext, showWhole, showMaps, showNeurons, showLens, showSteps, showStream);
