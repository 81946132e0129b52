// --- the residual lattice: what the stream is made of at every token and depth ---------------------------------------

Object.assign(state, { depth: null, threshold: 0, into: "answer", tint: "top" });

const drawLattice = (lattice) => {
  const { layers } = lattice;
  const fractions = (text) => unpacked(text, Uint16Array);
  const own = Object.fromEntries(Object.entries(lattice.own).map(([kind, text]) => [kind, fractions(text)]));
  const answers = fractions(lattice.answer);
  const share = (kind, layer, pos) => own[kind][layer * n + pos] / 65535;
  const moves = Array.from({ length: layers * n }, () => []);
  const flat = fractions(lattice.edges);
  for (let i = 0; i < flat.length; i += 5) {
    const [layer, head, query, key, part] = flat.slice(i, i + 5);
    moves[layer * n + query].push({ layer, head, query, key, share: part / 65535 });
  }
  const active = new Map();
  const counted = fractions(lattice.neurons);
  for (let i = 0; i < counted.length; i += 4) {
    const [layer, pos, neuron, part] = counted.slice(i, i + 4);
    const place = layer * n + pos;
    active.set(place, [...(active.get(place) ?? []), { part: `L${layer}N${neuron}`, share: part / 65535 }]);
  }
  moves.forEach((parts) => parts.sort((a, b) => b.share - a.share));

  // --- where things stand

  one(".unlatticed").remove();
  one(".latticed").hidden = false;
  const field = one("#field");
  const [high, left, top] = [layers > 6 ? Math.max(34, Math.min(64, 1100 / layers)) : 80, 62, 18];
  const wide = Math.max(58, Math.min(88, Math.floor((field.parentElement.clientWidth - left - 14) / n)));
  const x = (pos) => left + (pos + 0.5) * wide;
  const y = (depth) => top + (layers - depth) * high;
  const half = 10;
  const joint = (layer) => y(layer) - half - 0.42 * (high - 2 * half);
  const box = (layer) => y(layer + 1) + half + 0.3 * (high - 2 * half);
  Object.assign(field.style, { width: `${left + n * wide + 14}px`, height: `${y(0) + 2.6 * half + 16}px` });

  field.style.setProperty("--fit", Math.min(1, 680 / parseFloat(field.style.width)).toFixed(3)); // on paper

  const svg = (name, attributes = {}, parent = null) => {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    parent?.append(made);
    return made;
  };
  const html = (name, properties, parent) => {
    const made = Object.assign(document.createElement(name), properties);
    parent.append(made);
    return made;
  };
  const picture = svg("svg", { class: "wires", width: field.style.width, height: field.style.height, "aria-hidden": "true" }, field);

  // --- nodes: the cells of the logit lens, the output on top

  const cells = all("#lens td[data-cell]");
  const grid = html("div", {}, field);
  grid.dataset.grid = n;
  const knots = [];
  for (let depth = layers; depth >= 0; depth--) {
    for (let pos = 0; pos < n; pos++) {
      const cell = cells[depth * n + pos];
      const knot = html("button", { type: "button", className: "knot", title: cell.title }, grid);
      html("bdi", { textContent: cell.textContent }, knot);
      Object.assign(knot.dataset, { cell: "", pos, depth });
      Object.assign(knot.style, { left: `${x(pos) - wide / 2 + 3}px`, top: `${y(depth) - half}px`, width: `${wide - 6}px` });
      knots[depth * n + pos] = knot;
    }
  }
  const aside = html("div", { className: "depths" }, field);
  aside.style.setProperty("--tall", field.style.height);
  for (let depth = 0; depth <= layers; depth++) {
    const name = depth === layers ? "output" : depth ? `after ${depth - 1}` : "embed";
    html("span", { textContent: name }, aside).style.top = `${y(depth) - half}px`;
  }
  const read = data.names.map((name, pos) => {
    const label = html("span", { className: "read tok", textContent: name }, field);
    Object.assign(label.style, { left: `${x(pos) - wide / 2}px`, top: `${y(0) + half + 6}px`, width: `${wide}px` });
    return label;
  });

  // --- the way back from a node over every edge above the threshold; what it carries: the node's sum, split by shares
  // at every step back, as far as it arrives at the embeddings

  const walk = (pos, depth) => {
    const found = { nodes: new Set(), joints: new Set(), own: [], moves: [], carried: 0 };
    const least = Math.round(state.threshold * 65535) / 65535;
    let above = new Map([[pos, 1]]);
    for (let layer = depth - 1; layer >= 0; layer--) {
      const below = new Map();
      const add = (at, part) => below.set(at, (below.get(at) ?? 0) + part);
      for (const [at, whole] of above) {
        found.nodes.add((layer + 1) * n + at);
        let reached = !own.resid_mid;
        let middle = own.resid_mid ? 0 : whole;
        for (const kind of ["mlp", "resid_mid"]) {
          if (!own[kind] || share(kind, layer, at) < least) continue;
          found.own.push({ kind, layer, pos: at });
          if (own.resid_mid) {
            reached = true;
            middle += whole * share(kind, layer, at);
          } else add(at, whole * share(kind, layer, at));
        }
        if (!reached) continue;
        found.joints.add(layer * n + at);
        if (share("resid", layer, at) >= least) {
          found.own.push({ kind: "resid", layer, pos: at });
          add(at, middle * share("resid", layer, at));
        }
        for (const move of moves[layer * n + at]) {
          if (move.share < least) break;
          found.moves.push(move);
          add(move.key, middle * move.share);
        }
      }
      above = below;
    }
    for (const [at, part] of above) {
      found.nodes.add(at);
      found.carried += part;
    }
    return found;
  };

  // --- lines

  const width = (part) => (0.8 + 5 * part).toFixed(2);
  const line = (layer, query, key) => {
    const [x0, y0, x1, y1] = [x(key), y(layer) - half, x(query), joint(layer)];
    const bow = key === query ? -wide / 3 : 0;
    const lean = Math.sign(x1 - x0) * Math.min(0.6 * wide, Math.abs(x1 - x0) / 2);
    return [x0, y0, x0 + bow + lean * 0.4, y0 - 0.8 * (y0 - y1), x1 + bow * 0.7 - lean, y1 + 0.1 * (y0 - y1), x1, y1];
  };
  const path = ([a, b, ...rest]) => `M${a} ${b}C${rest.map((value) => value.toFixed(1)).join(" ")}`;
  const onLine = (p, t) => [0, 1].map((i) =>
    (1 - t) ** 3 * p[i] + 3 * (1 - t) ** 2 * t * p[2 + i] + 3 * (1 - t) * t ** 2 * p[4 + i] + t ** 3 * p[6 + i]);
  const ownLine = (kind, layer, pos) => {
    const [at, middle, end] = [x(pos), joint(layer), y(layer + 1) + half];
    if (kind === "resid") return `M${at} ${y(layer) - half}V${middle}`;
    if (kind === "resid_mid" || !own.mlp) return `M${at} ${middle}V${end}`;
    const start = own.resid_mid ? middle : y(layer) - half;
    return `M${at} ${start}Q${at + 21} ${start - 2} ${at + 21} ${box(layer)}Q${at + 21} ${end + 2} ${at} ${end}`;
  };
  const signed = (value) => (value > 0 ? "+" : "") + number(value, 3);
  const percent = (value) => `${number(100 * value, 1)} %`;
  const name = (pos) => `${data.names[pos]} (${pos})`;
  const added = (kind, layer, pos, head, key) => {
    if (pos !== n - 1 || (kind !== "head" && kind !== "mlp")) return null;
    return kind === "mlp" ? lattice.mlps[layer] : data.moved[layer][head][key];
  };
  const effect = (value) => value === null ? "not at the last token: it reaches the answer through later parts alone" : `adds ${signed(value)} logits to the answer by itself`;
  const meaning = { mlp: "MLP of layer", resid: "stream before layer", resid_mid: "stream between attention and MLP of layer" };

  const heads = (group) => group.map((move) => `${headName(move.layer, move.head)}: ${percent(move.share)} of the sum after attention\n${effect(added("head", move.layer, move.query, move.head, move.key))}`).join("\n");
  // A name only where no stronger line has its own: on hover every line says what it is.
  let placed = [];
  const free = (at, up, wide) => {
    const clear = placed.every(([a, b, broad]) => Math.abs(a - at) > (wide + broad) / 2 + 4 || Math.abs(b - up) > 13);
    if (clear) placed.push([at, up, wide]);
    return clear;
  };
  const drawMove = (group) => {
    const [{ layer, query, key }] = group;
    const points = line(layer, query, key);
    const wire = svg("g", { class: "wire" }, picture);
    wire.moves = group;
    svg("path", { d: path(points), class: "grip" }, wire);
    svg("path", { d: path(points), "stroke-width": width(group.reduce((sum, move) => sum + move.share, 0)) }, wire);
    const label = headName(layer, group[0].head) + (group.length > 1 ? ` +${group.length - 1}` : "");
    const spot = [0.5, 0.65, 0.35, 0.8, 0.2].map((t) => onLine(points, t)).find(([at, up]) => free(at, up, 6.5 * label.length));
    if (spot) {
      const [at, up] = spot;
      svg("text", { x: at.toFixed(1), y: (up - 3).toFixed(1) }, wire).textContent = label;
    }
    explain(wire, `${name(key)} → ${name(query)}, layer ${layer}\n${heads(group)}`);
    wire.addEventListener("click", () => select({ layer, head: group[0].head, pos: query, depth: layer + 1 }));
  };
  const drawOwn = ({ kind, layer, pos }) => {
    const wire = svg("g", { class: `wire ${kind}` }, picture);
    const d = ownLine(kind, layer, pos);
    svg("path", { d, class: "grip" }, wire);
    svg("path", { d, "stroke-width": width(share(kind, layer, pos)) }, wire);
    if (kind === "mlp") {
      placed.push([x(pos) + 21, box(layer) + 4, 34]);
      svg("rect", { x: x(pos) + 4, y: box(layer) - 7, width: 34, height: 14, rx: 2 }, wire);
      svg("text", { x: x(pos) + 21, y: box(layer) + 4 }, wire).textContent = "MLP";
    }
    const after = kind === "resid" ? "attention" : "the MLP";
    const logits = added(kind, layer, pos);
    const tail = kind === "mlp" ? `\n${effect(logits)}` : "";
    explain(wire, `${meaning[kind]} ${layer}, at ${name(pos)}\n${percent(share(kind, layer, pos))} of the sum after ${own.resid_mid ? after : "the block"}${tail}`);
    wire.addEventListener("click", () => select({ layer, pos, depth: layer + 1 }));
  };

  let drawn = "";
  const drawWires = () => {
    const [pos, depth] = state.into === "node" ? [state.pos, state.depth ?? layers] : [n - 1, layers];
    const wanted = [state.threshold, pos, depth].join();
    if (wanted === drawn) return;
    drawn = wanted;
    const found = walk(pos, depth);
    const strong = new Set(found.moves);
    let faint = "";
    for (let layer = 0; layer < layers; layer++) {
      for (let at = 0; at < n; at++) faint += `M${x(at)} ${y(layer) - half}V${y(layer + 1) + half}`;
    }
    const weak = new Set();
    for (const move of moves.flat()) {
      if (move.share >= state.threshold && !strong.has(move)) weak.add([move.layer, move.query, move.key].join());
    }
    for (const ends of weak) faint += path(line(...ends.split(",").map(Number)));
    picture.replaceChildren();
    placed = [];
    svg("path", { class: "faint", d: faint }, picture);
    found.own.forEach(drawOwn);
    const groups = grouped(found.moves);
    [...groups.values()].sort((a, b) => b[0].share - a[0].share).forEach(drawMove);
    for (const place of found.joints) {
      svg("circle", { cx: x(place % n), cy: joint(Math.floor(place / n)), r: 2.5 }, picture);
    }
    knots.forEach((knot, place) => knot.classList.toggle("off", !found.nodes.has(place)));
    one("#carried-share").textContent = `${number(100 * found.carried, 0)} %`;
    picture.dataset.moves = found.moves.length;
    picture.dataset.own = found.own.length;
  };
  const grouped = (list) => {
    const groups = new Map();
    for (const move of list) {
      const key = [move.layer, move.query, move.key].join();
      groups.set(key, [...(groups.get(key) ?? []), move]);
    }
    return groups;
  };

  // --- what the chosen node is made of

  const LISTED = 8;
  const ownWords = { mlp: "MLP", resid: "stream before", resid_mid: "stream between" };
  const rowsOf = (pos, depth) => {
    const layer = depth - 1;
    const listed = moves[depth * n - n + pos];
    const shown = listed.slice(0, LISTED).map((move) => ({ part: headName(layer, move.head), from: move.key, head: move.head, share: move.share, adds: added("head", layer, pos, move.head, move.key) }));
    const single = (kind) => ({ part: ownWords[kind], from: pos, share: share(kind, layer, pos), adds: added(kind, layer, pos) });
    const neurons = (active.get(layer * n + pos) ?? []).map((neuron) => ({ ...neuron, from: null, adds: null, inner: true }));
    const mlp = own.mlp ? [single("mlp"), ...neurons] : [];
    const first = [single("resid"), ...shown];
    const rest = Math.max(0, 1 - first.reduce((sum, row) => sum + row.share, share("attn_bias", layer, pos)) - (own.resid_mid || !own.mlp ? 0 : mlp[0].share));
    first.push({ part: "attention's bias", from: null, share: share("attn_bias", layer, pos), adds: null });
    first.push({ part: "other moves", from: null, share: rest, adds: null });
    if (!own.resid_mid) return [["", [...mlp, ...first]]];
    return [["after the MLP", [...mlp, single("resid_mid")]], ["after attention", first]];
  };
  const showMade = () => {
    const [pos, depth] = [state.pos, state.depth ?? layers];
    const cell = cells[depth * n + pos];
    const place = depth === layers ? "the output" : depth ? `layer ${depth - 1}` : "the embedding";
    one("#made-of").textContent = `${data.names[pos]} (${pos}) after ${place}`;
    one("#made-note").textContent = `The lens reads ${cell.textContent} there. ` + (depth ? "What the sum is made of:" : "Nothing comes before the embedding.");
    const body = one("#made tbody");
    body.replaceChildren();
    one("#made").hidden = !depth;
    if (!depth) return;
    for (const [title, rows] of rowsOf(pos, depth)) {
      if (title) html("th", { textContent: title, colSpan: 4, className: "group left" }, html("tr", {}, body));
      for (const row of rows) {
        const line = html("tr", { className: row.inner ? "inner" : "" }, body);
        const head = html("th", { scope: "row", textContent: row.head === undefined ? row.part : "" }, line);
        if (row.head !== undefined) {
          const button = html("button", { type: "button", className: "link", textContent: row.part }, head);
          Object.assign(button.dataset, { layer: depth - 1, head: row.head });
        }
        html("td", { className: "tok", textContent: row.from === null ? "" : name(row.from) }, line);
        html("td", { textContent: percent(row.share) }, line);
        html("td", { textContent: row.inner ? "" : row.adds === null ? "–" : signed(row.adds) }, line);
      }
    }
  };

  let shown = "";
  let tinted = "";
  const showLattice = () => {
    const asked = ["pos", "depth", "layer", "head", "threshold", "into", "tint"].map((name) => state[name]).join();
    if (asked === shown) return;
    shown = asked;
    drawWires();
    const [pos, depth] = [state.pos, state.depth ?? layers];
    const tint = state.tint;
    if (tint !== tinted) {
      tinted = tint;
      knots.forEach((knot, place) => shade(knot, tint === "top" ? Number(cells[place].style.getPropertyValue("--v")) : answers[place] / 65535));
    }
    knots.forEach((knot, place) => {
      const chosen = place === depth * n + pos;
      knot.classList.toggle("chosen", chosen);
      knot.setAttribute("aria-pressed", chosen);
    });
    read.forEach((label, at) => label.classList.toggle("chosen", at === pos));
    for (const wire of all(".wire", picture)) {
      wire.classList.toggle("lit", (wire.moves ?? []).some((move) => move.layer === state.layer && move.head === state.head));
    }
    one("#least").textContent = `${number(100 * state.threshold, 1)} %`;
    showMade();
  };

  grid.addEventListener("click", (event) => {
    const knot = event.target.closest(".knot");
    if (!knot) return;
    const depth = +knot.dataset.depth;
    select({ pos: +knot.dataset.pos, depth, layer: depth ? depth - 1 : state.layer });
  });
  const slider = one("#threshold");
  const slide = () => { state.threshold = lattice.steps[+slider.value]; };
  slide();
  slider.addEventListener("input", () => { slide(); select({}); });
  for (const control of all("input[name=into], input[name=tint]")) {
    control.addEventListener("change", () => select({ [control.name]: control.value }));
  }
  field.parentElement.scrollLeft = field.scrollWidth; // where the answer stands
  views.push(showLattice);
};
if (data.lattice) drawLattice(data.lattice);
