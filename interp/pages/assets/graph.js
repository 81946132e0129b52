// --- an attribution graph: what matters drawn, what is pinned drawn once more, groups made, and all of it saved --------

const { record, levels } = data;
const spots = data.nodes.map(([label, brief, shape, level], i) => ({ ...record.nodes[i], i, label, brief, shape, level, pos: record.nodes[i].ctx_idx }));
const links = data.weight.map((weight, i) => ({ i, weight, source: data.source[i], target: data.target[i] }));
const byId = new Map(spots.map((spot) => [spot.node_id, spot.i]));
const into = spots.map(() => []);
const outOf = spots.map(() => []);
for (const link of links) {
  into[link.target].push(link);
  outOf[link.source].push(link);
}
const larger = (a, b) => Math.abs(b.weight) - Math.abs(a.weight) || a.i - b.i;
for (const each of [...into, ...outOf]) each.sort(larger);

// The groups keep the ids of nodes that are not in the file; of the nodes that are, all are pinned.
const groups = record.qParams.supernodes.filter((group) => group.length).map(([name, ...members]) => ({ name, members }));
const pins = new Set([...record.qParams.pinnedIds, ...groups.flatMap((group) => group.members)]);
const isPinned = (i) => pins.has(spots[i].node_id);
const groupOf = (i) => groups.find((group) => group.members.includes(spots[i].node_id));
Object.assign(state, { by: "influence", count: data.opens, lines: 150, chosen: null, at: null });

const svg = (name, attributes = {}, parent = null) => {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  parent?.append(made);
  return made;
};
const html = (name, properties = {}, parent = null) => {
  const made = Object.assign(document.createElement(name), properties);
  parent?.append(made);
  return made;
};

// --- how names and numbers are written

const harmless = (text) => text.replace(/[\p{C}\p{Zl}\p{Zp}]/gu, (c) => `⟨U+${c.codePointAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`);
const short = (x) => (Math.abs(x) >= 1000 || (x && Math.abs(x) < 0.001) ? x.toExponential(2) : x.toPrecision(3)).replaceAll("-", "−");
const signed = (x) => (x > 0 ? "+" : "") + short(x);
const place = (spot) => (data.placeless ? "" : `${data.names[spot.pos] ?? "–"} (${spot.pos})`);
const titled = (spot) => {
  if (data.placeless || spot.feature_type === "logit") return spot.label;
  return spot.feature_type === "embedding" ? `${spot.label} (${spot.pos})` : `${spot.label} @ ${place(spot)}`;
};
const cut = (text, most) => ([...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text);
const meant = (spot) => {
  const [words, ranked, carried] = data.rankings.influence;
  const rank = ranked.indexOf(spot.i);
  return [
    `${harmless(spot.feature_type)}, ${levels[spot.level]}${data.placeless ? "" : `, at ${place(spot)}`}`,
    spot.activation === null ? "" : `value ${short(spot.activation)}`,
    spot.effect === undefined ? "" : `effect ${signed(spot.effect)} logits`,
    rank < 0 ? "" : `${short(100 * (carried[rank] - (carried[rank - 1] ?? 0)))} % of the ${words}, rank ${rank + 1}`,
    groupOf(spot.i) ? `in group ${harmless(groupOf(spot.i).name)}` : "",
  ].filter(Boolean).join("\n");
};

// --- boxes and lines of both drawings

const HIGH = 18;
const ink = document.createElement("canvas").getContext("2d");
ink.font = "11px system-ui, sans-serif";
const wide = (text) => Math.ceil(Math.max(30, ink.measureText(text).width + 14));

const box = (spot, x, y, parent) => {
  const made = svg("g", { class: `spot ${spot.shape}`, role: "button", tabindex: -1, transform: `translate(${x.toFixed(1)} ${y.toFixed(1)})` }, parent);
  const width = wide(spot.text);
  svg("rect", { x: -width / 2, y: -HIGH / 2, width, height: HIGH, rx: spot.shape === "square" ? 2 : 8 }, made);
  svg("text", { dy: ".35em" }, made).textContent = spot.text;
  return made;
};
// From the top of the source to the bottom of the target; beside or below it the line leaves and arrives by a bow.
const curve = ([x1, y1], [x2, y2]) => {
  const up = y1 - y2 > HIGH;
  const bend = up ? Math.max(14, 0.42 * (y1 - y2)) : 26;
  const [start, end] = [y1 - HIGH / 2, up ? y2 + HIGH / 2 : y2 - HIGH / 2];
  return `M${x1.toFixed(1)} ${start.toFixed(1)}C${x1.toFixed(1)} ${(start - bend).toFixed(1)} ${x2.toFixed(1)} ${(end + (up ? bend : -bend)).toFixed(1)} ${x2.toFixed(1)} ${end.toFixed(1)}`;
};
const line = (weight, strongest, from, to, says, parent) => {
  const size = Math.abs(weight) / strongest;
  const made = svg("g", { class: `edge${weight < 0 ? " neg" : ""}` }, parent);
  const d = curve(from, to);
  svg("path", { d, class: "reach" }, made);
  svg("path", { d, "stroke-width": (0.7 + 5.3 * size).toFixed(2), style: `--o:${(0.22 + 0.5 * Math.sqrt(size)).toFixed(2)}` }, made);
  explain(made, says);
  made.removeAttribute("aria-description");
  return made;
};

// --- which nodes are drawn, and where they stand

const net = one("#net");
const LEFT = 58;
const drawn = () => {
  const [, ranked] = data.rankings[state.by];
  const wanted = new Set(ranked.slice(0, state.count));
  for (const spot of spots) {
    if (spot.level === levels.length - 1 && levels.at(-1) === "logits") wanted.add(spot.i);
    if (isPinned(spot.i)) wanted.add(spot.i);
  }
  if (state.chosen !== null) wanted.add(state.chosen);
  return [...wanted].sort((a, b) => a - b);
};

// Boxes of one token and layer stand side by side, many of them in several lines.
const cellsOf = (nodes) => {
  const cells = new Map();
  for (const i of nodes) {
    const spot = spots[i];
    const key = `${spot.pos} ${spot.level}`;
    const cell = cells.get(key) ?? { pos: spot.pos, level: spot.level, here: [] };
    cells.set(key, cell);
    cell.here.push(spot);
    spot.text = cut(spot.brief, spot.shape === "square" ? 28 : 18);
  }
  return [...cells.values()].map(({ pos, level, here }) => {
    const most = Math.max(3, Math.ceil(Math.sqrt(1.4 * here.length)));
    const lines = [];
    for (let i = 0; i < here.length; i += most) lines.push(here.slice(i, i + most));
    return { pos, level, lines };
  });
};
const lineWidth = (spotsOfLine) => spotsOfLine.reduce((sum, spot) => sum + wide(spot.text) + 6, -6);

const columnsOf = (cells) => {
  const used = new Map();
  for (const cell of cells) used.set(cell.pos, Math.max(used.get(cell.pos) ?? 0, ...cell.lines.map(lineWidth)));
  const columns = [];
  for (let pos = 0; pos < n; pos++) {
    if (data.placeless && !used.has(pos)) continue;
    if (used.has(pos)) columns.push({ pos, width: used.get(pos) + 9 });
    else if (n <= 48) columns.push({ pos, width: 18, empty: true });
    else if (columns.at(-1)?.gap) columns.at(-1).until = pos;
    else columns.push({ pos, until: pos, width: 26, empty: true, gap: true });
  }
  const room = net.parentElement.clientWidth - LEFT - 16 - columns.reduce((sum, { width }) => sum + width, 0);
  const stretched = columns.filter(({ empty }) => !empty);
  let left = LEFT;
  for (const column of columns) {
    if (!column.empty && room > 0) column.width += Math.min(70, room / stretched.length);
    column.left = left;
    left += column.width;
  }
  return { columns, width: left + 10 };
};

const placed = (nodes) => {
  const cells = cellsOf(nodes);
  const { columns, width } = columnsOf(cells);
  const middle = new Map(columns.map(({ pos, left, width: own }) => [pos, left + own / 2]));
  const tall = new Map();
  for (const { level, lines } of cells) tall.set(level, Math.max(tall.get(level) ?? 0, lines.length));
  const used = [...tall.keys()].sort((a, b) => b - a);
  const gap = used.length > 24 ? 12 : used.length > 12 ? 18 : 26;
  const rows = [];
  let top = 16;
  for (const level of used) {
    rows.push({ level, y: top + (HIGH + 5) * (tall.get(level) - 1) / 2 });
    top += (HIGH + 5) * tall.get(level) + gap;
  }
  const at = new Map(rows.map(({ level, y }) => [level, y]));
  const where = new Map();
  for (const { pos, level, lines } of cells) {
    lines.forEach((spotsOfLine, row) => {
      let x = middle.get(pos) - lineWidth(spotsOfLine) / 2;
      for (const spot of spotsOfLine) {
        where.set(spot.i, [x + wide(spot.text) / 2, at.get(level) + (HIGH + 5) * (row - (lines.length - 1) / 2)]);
        x += wide(spot.text) + 6;
      }
    });
  }
  return { where, rows, columns, width, height: top - gap + 14 };
};

// --- the drawing

const stacked = matchMedia("(max-width: 63.99rem)");  // what is said of a node does not stand beside the drawing
let picture;  // what is drawn now: boxes by node, lines by link, labels of tokens
const sayLink = ({ source, target, weight }) => `${titled(spots[source])} → ${titled(spots[target])}\nweight ${signed(weight)}`;
const drawNet = () => {
  hideTip();
  const nodes = drawn();
  const { where, rows, columns, width, height } = placed(nodes);
  const inside = links.filter(({ source, target }) => where.has(source) && where.has(target)).sort(larger);
  const shown = inside.slice(0, state.lines);
  net.replaceChildren();
  net.style.width = `${width}px`;
  const aside = html("div", { className: "rows" }, net);
  aside.style.setProperty("--tall", `${height}px`);
  for (const { level, y } of rows) html("span", { textContent: levels[level] }, aside).style.top = `${y - 9}px`;
  const view = svg("svg", { width, height, role: "group", "aria-label": "Nodes by token and layer" }, net);
  const lines = svg("g", { class: "lines", "aria-hidden": "true" }, view);
  const strongest = Math.max(...shown.map(({ weight }) => Math.abs(weight)), 0) || 1;
  const drawLine = (link) => line(link.weight, strongest, where.get(link.source), where.get(link.target), sayLink(link), lines);
  const edges = new Map(shown.toReversed().map((link) => [link.i, drawLine(link)]));
  const layer = svg("g", {}, view);
  const boxes = new Map(nodes.map((i) => {
    const made = box(spots[i], ...where.get(i), layer);
    made.dataset.node = i;
    if (spots[i].effect) made.classList.add(spots[i].effect > 0 ? "pos" : "neg");
    made.setAttribute("aria-label", titled(spots[i]));
    made.setAttribute("aria-description", meant(spots[i]));
    if (stacked.matches) explain(made, `${titled(spots[i])}\n${meant(spots[i])}`);
    return [i, made];
  }));
  const feet = html("div", { className: "feet" }, net);
  const upright = columns.some(({ empty, gap }) => empty && !gap);
  feet.style.height = upright ? "5rem" : "1.6rem";
  feet.hidden = data.placeless;
  const tokens = new Map(columns.map(({ pos, until, left, width: own, empty, gap }) => {
    const text = gap ? "⋯" : data.names[pos];
    const label = html("span", { className: gap || !empty ? "stood" : "upright", textContent: text }, feet);
    if (gap) explain(label, data.names.slice(pos, until + 1).join(" "));
    Object.assign(label.style, empty && !gap ? { left: `${left + 1}px` } : { left: `${left}px`, width: `${own}px` });
    return [pos, label];
  }));
  picture = { boxes, edges, tokens, where, view, lines, drawLine, extra: [] };
  const [words, ranked, carried] = data.rankings[state.by];
  const taken = Math.min(state.count, ranked.length);
  const also = nodes.length - ranked.slice(0, taken).length - spots.filter(({ level }) => levels[level] === "logits").length;
  one("#carried").textContent = `These ${taken} of ${ranked.length} nodes carry ${number(100 * (carried[taken - 1] ?? 0), 1)} % of the ${words}`
    + `${also > 0 ? `; ${also} more ${also > 1 ? "are" : "is"} pinned or chosen` : ""}. Drawn are ${shown.length === inside.length ? "all" : `the strongest ${shown.length} of`} ${inside.length} links between them${levels.at(-1) === "logits" ? " and the logits" : ""}.`;
  one("#node-count").textContent = taken;
  one("#link-count").textContent = shown.length;
  const stop = boxes.get(state.chosen) ?? boxes.get(state.at) ?? boxes.get(nodes.at(-1));
  if (stop) stop.tabIndex = 0;
};

// --- what belongs to the node that is pointed at, in focus or chosen

const pointed = () => state.pointed ?? state.chosen;
const showNear = () => {
  const i = pointed();
  picture.extra.splice(0).forEach((made) => made.remove());
  const near = new Set(i === null ? [] : [i]);
  const lit = new Set();
  if (i !== null) {
    for (const side of [into[i], outOf[i]]) {
      const here = side.filter(({ source, target }) => picture.where.has(source) && picture.where.has(target));
      for (const [rank, link] of here.entries()) {
        if (rank >= 10 && !picture.edges.has(link.i)) continue;
        lit.add(link.i);
        near.add(link.source).add(link.target);
        if (!picture.edges.has(link.i)) {
          const made = picture.drawLine(link);
          made.classList.add("lit");
          picture.extra.push(made);
        }
      }
    }
  }
  picture.view.classList.toggle("focused", i !== null);
  for (const [link, made] of picture.edges) made.classList.toggle("lit", lit.has(link));
  for (const [node, made] of picture.boxes) {
    made.classList.toggle("near", near.has(node));
    made.classList.toggle("chosen", node === state.chosen);
    made.classList.toggle("pinned", isPinned(node));
    made.setAttribute("aria-pressed", isPinned(node));
  }
  for (const [pos, label] of picture.tokens) label.classList.toggle("near", i !== null && !data.placeless && spots[i].pos === pos);
  showBeside(i);
};

const table = (rows, head, parent) => {
  const made = html("table", { className: "numbers" }, parent);
  const top = html("tr", {}, html("thead", {}, made));
  head.forEach((word, i) => html("th", { scope: "col", className: i < head.length - 1 ? "left" : "", textContent: word }, top));
  html("td", { className: "wide" }, top);
  const body = html("tbody", {}, made);
  const strongest = Math.max(...rows.map(({ weight }) => Math.abs(weight)), 0) || 1;
  for (const { ends, weight, written } of rows) {
    const row = html("tr", {}, body);
    ends.forEach((end, i) => {
      const cell = html(i ? "td" : "th", { className: "left" }, row);
      if (!i) cell.scope = "row";
      if (typeof end === "string") {
        cell.textContent = end;
        return;
      }
      const button = html("button", { type: "button", className: "link left", textContent: titled(end) }, cell);
      if (!picture.where.has(end.i)) button.classList.add("off");
      button.addEventListener("click", () => choose(end.i, true));
    });
    html("td", { textContent: written ?? signed(weight) }, row);
    html("i", {}, html("td", { className: `bar${weight < 0 ? " neg" : ""}` }, row)).style.width = `${(100 * Math.abs(weight) / strongest).toFixed(1)}%`;
  }
};

let besides;
const showBeside = (i) => {
  const key = [i, i !== null && isPinned(i), state.by, groups.map(({ name }) => name)].join();
  if (besides === key) return;
  besides = key;
  const rest = one("#chosen-links");
  rest.replaceChildren();
  one("#chosen-do").replaceChildren();
  if (i === null) {
    const [words, ranked, carried] = data.rankings[state.by];
    one("#chosen-name").textContent = "Nodes that matter most";
    one("#chosen-note").textContent = "Point at a node to see its links.";
    const effects = state.by === "effect";
    table(ranked.slice(0, 12).map((node, rank) => {
      const share = 100 * (carried[rank] - (carried[rank - 1] ?? 0));
      return { ends: [spots[node]], weight: effects ? spots[node].effect : share, written: effects ? undefined : `${number(share, 1)} %` };
    }), ["node", effects ? "effect" : words], rest);
    return;
  }
  const spot = spots[i];
  one("#chosen-name").textContent = titled(spot);
  one("#chosen-note").textContent = meant(spot);
  const button = html("button", { type: "button", className: "plain", textContent: isPinned(i) ? "Unpin" : "Pin" }, one("#chosen-do"));
  button.addEventListener("click", () => {
    pin(i);
    one("#chosen-do button")?.focus();
  });
  for (const [word, side, end] of [["In", into[i], "source"], ["Out", outOf[i], "target"]]) {
    if (!side.length) continue;
    const title = html("h4", { textContent: `${word} ` }, rest);
    html("small", { textContent: side.length > 10 ? `the strongest 10 of ${side.length}` : `${side.length}` }, title);
    table(side.slice(0, 10).map((link) => ({ ends: [spots[link[end]]], weight: link.weight })), [end === "source" ? "from" : "to", "weight"], rest);
  }
};

// --- choosing and pinning

const showAll = (redrawn) => {
  const focused = net.contains(document.activeElement) ? document.activeElement.dataset.node : undefined;
  if (redrawn) {
    const room = net.parentElement;
    const beyond = room.scrollWidth - room.scrollLeft;  // kept, as the answer stands at the end
    drawNet();
    room.scrollLeft = room.scrollWidth - beyond;
  }
  showNear();
  showPinned();
  if (redrawn && focused !== undefined) picture.boxes.get(+focused)?.focus({ preventScroll: true });
};
const choose = (i, far = false) => {
  const known = i === null || picture.where.has(i);
  state.chosen = i;
  state.pointed = null;
  showAll(!known);
  if (far && i !== null) {
    picture.boxes.get(i).scrollIntoView({ block: "nearest", inline: "nearest" });
    picture.boxes.get(i).focus({ preventScroll: true });
  }
};
const pin = (i) => {
  const { node_id: id } = spots[i];
  if (pins.delete(id)) {
    for (const group of groups) group.members = group.members.filter((member) => member !== id);
    groups.splice(0, groups.length, ...groups.filter(({ members }) => members.length));
  } else pins.add(id);
  state.chosen = i;
  showAll(!picture.where.has(i));
};
state.pointed = null;
const nodeOf = (event) => {
  const made = event.target.closest?.("[data-node]");
  return made ? +made.dataset.node : null;
};
net.addEventListener("pointerover", (event) => {
  const i = nodeOf(event);
  if (i === state.pointed) return;
  state.pointed = i;
  showNear();
});
net.addEventListener("pointerleave", () => {
  state.pointed = null;
  showNear();
});
net.addEventListener("focusin", (event) => {
  const i = nodeOf(event);
  if (i === null) return;
  for (const [node, made] of picture.boxes) made.tabIndex = node === i ? 0 : -1;
  state.at = i;
  if (event.target.matches(":focus-visible")) {
    state.pointed = i;
    showNear();
  }
});
net.addEventListener("focusout", () => {
  state.pointed = null;
  showNear();
});
net.addEventListener("click", (event) => {
  const i = nodeOf(event);
  if (i === null) choose(null);
  else pin(i);
});
// The nearest node in the direction of an arrow: sideways in its row first, upwards in its column first.
const toward = (i, [dx, dy]) => {
  const [x, y] = picture.where.get(i);
  let [best, least] = [null, Infinity];
  for (const [node, [a, b]] of picture.where) {
    const [ahead, aside] = dx ? [(a - x) * dx, Math.abs(b - y)] : [(b - y) * dy, Math.abs(a - x)];
    if (node === i || ahead <= 1) continue;
    const far = ahead + (dx ? 4 : 1.5) * aside;
    if (far < least) [best, least] = [node, far];
  }
  return best;
};
net.addEventListener("keydown", (event) => {
  const i = nodeOf(event);
  if (i === null) return;
  const way = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
  const next = way && toward(i, way);
  if (way) {
    event.preventDefault();
    if (next !== null) picture.boxes.get(next).focus();
  } else if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    pin(i);
  } else if (event.key === "Escape") choose(null);
});

// --- the sub-graph: pinned nodes and groups, and the sums of links between them

const unitsOf = () => {
  const known = groups.map(({ name, members }) => ({ name, nodes: members.filter((id) => byId.has(id)).map((id) => byId.get(id)) }));
  const units = known.filter(({ nodes }) => nodes.length).map(({ name, nodes }) => {
    const sorted = nodes.map((i) => spots[i].level).sort((a, b) => a - b);
    const pos = nodes.reduce((sum, i) => sum + spots[i].pos, 0) / nodes.length;
    return { label: harmless(name), text: cut(harmless(name), 24), nodes, level: sorted[Math.floor((sorted.length - 1) / 2)], pos, shape: "super" };
  });
  const inGroups = new Set(units.flatMap(({ nodes }) => nodes));
  for (const id of pins) {
    const i = byId.get(id);
    if (i === undefined || inGroups.has(i)) continue;
    units.push({ ...spots[i], label: titled(spots[i]), text: cut(spots[i].brief, 24), nodes: [i] });
  }
  return units;
};
const sumsOf = (units) => {
  const unitOf = new Map();
  units.forEach(({ nodes }, u) => nodes.forEach((i) => unitOf.has(i) || unitOf.set(i, u)));
  const sums = new Map();
  for (const { source, target, weight } of links) {
    const [a, b] = [unitOf.get(source), unitOf.get(target)];
    if (a === undefined || b === undefined || a === b) continue;
    const found = sums.get(`${a} ${b}`) ?? { source: a, target: b, weight: 0, count: 0 };
    found.weight += weight;
    found.count += 1;
    sums.set(`${a} ${b}`, found);
  }
  return [...sums.values()].sort((a, b) => Math.abs(b.weight) - Math.abs(a.weight));
};
const sub = one("#sub");
const drawSub = () => {
  const units = unitsOf();
  const sums = sumsOf(units);
  const used = [...new Set(units.map(({ level }) => level))].sort((a, b) => b - a);
  const step = used.length > 12 ? 40 : 54;
  const room = Math.max(sub.parentElement.clientWidth - 8, 300);
  let width = room;
  const stood = [...new Set(units.map(({ pos }) => pos))].sort((a, b) => a - b);
  const rows = used.map((level) => units.filter((unit) => unit.level === level).sort((a, b) => a.pos - b.pos));
  for (const row of rows) width = Math.max(width, row.reduce((sum, { text }) => sum + wide(text) + 14, LEFT));
  rows.forEach((row, r) => {
    let left = LEFT;
    let rest = row.reduce((sum, { text }) => sum + wide(text) + 14, 0);
    for (const unit of row) {
      const half = wide(unit.text) / 2 + 7;
      const wanted = LEFT + (width - LEFT) * (stood.indexOf(unit.pos) + 0.5) / stood.length;
      const x = Math.min(Math.max(left + half, wanted), width - rest + half);
      unit.place = [x, 22 + r * step];
      left = x + half;
      rest -= 2 * half;
    }
  });
  sub.replaceChildren();
  one("#sub-links").replaceChildren();
  if (!units.length) return;
  const view = svg("svg", { width, height: 22 + (rows.length - 1) * step + 26, role: "img", "aria-label": `${units.length} pinned nodes and groups, ${sums.length} links` }, sub);
  rows.forEach(([first], r) => { svg("text", { class: "row", x: 2, y: 22 + r * step, dy: ".35em", fill: "var(--muted)" }, view).textContent = levels[first.level]; });
  const lines = svg("g", { class: "lines" }, view);
  const strongest = Math.abs(sums[0]?.weight ?? 1) || 1;
  for (const { source, target, weight, count } of sums.toReversed()) {
    const says = `${units[source].label} → ${units[target].label}\nweight ${signed(weight)}${count > 1 ? `, the sum of ${count} links` : ""}`;
    line(weight, strongest, units[source].place, units[target].place, says, lines);
  }
  for (const unit of units) {
    const made = box(unit, ...unit.place, view);
    made.removeAttribute("role");
    made.removeAttribute("tabindex");
    explain(made, unit.shape === "super" ? `${unit.label}: ${unit.nodes.length} nodes\n${unit.nodes.map((i) => titled(spots[i])).join("\n")}` : `${unit.label}\n${meant(spots[unit.nodes[0]])}`);
    made.removeAttribute("aria-description");
    if (unit.nodes.length === 1) made.addEventListener("click", () => choose(unit.nodes[0], true));
  }
  if (sums.length) table(sums.map(({ source, target, weight }) => ({ ends: [units[source].label, units[target].label], weight })), ["from", "to", "weight"], one("#sub-links"));
  else html("p", { className: "note", textContent: "No link joins them." }, one("#sub-links"));
};

// --- groups: made of ticked nodes, renamed, taken apart

const freeName = (wanted, except = null) => {
  const name = wanted.trim() || "group";
  const taken = new Set(groups.filter((group) => group !== except).map((group) => group.name));
  if (wanted.trim() && !taken.has(name)) return name;
  for (let k = wanted.trim() ? 2 : 1; ; k++) if (!taken.has(`${name} ${k}`)) return `${name} ${k}`;
};
const ticked = new Set();
const showPinned = () => {
  const units = unitsOf();
  const single = units.filter(({ shape }) => shape !== "super").map(({ nodes: [i] }) => i);
  for (const i of [...ticked]) if (!single.includes(i)) ticked.delete(i);
  const several = (count, word) => `${count} ${word}${count === 1 ? "" : "s"}`;
  one("#pin-count").textContent = units.length
    ? `${several([...pins].filter((id) => byId.has(id)).length, "pinned node")}, ${several(units.length - single.length, "group")}.`
    : "Nothing is pinned yet: click nodes of the graph.";
  one("#unpin").hidden = !units.length;
  one("#grouping").hidden = !single.length;
  one("#pins").replaceChildren();
  for (const i of single) {
    const chip = html("span", { className: "chip" }, one("#pins"));
    const label = html("label", {}, chip);
    const tick = html("input", { type: "checkbox", checked: ticked.has(i) }, label);
    label.append(titled(spots[i]));
    tick.addEventListener("change", () => (tick.checked ? ticked.add(i) : ticked.delete(i)));
    const off = html("button", { type: "button", className: "link", textContent: "×", ariaLabel: `Unpin ${titled(spots[i])}` }, chip);
    off.addEventListener("click", () => pin(i));
  }
  one("#groups").replaceChildren();
  for (const group of groups) {
    const nodes = group.members.filter((id) => byId.has(id)).map((id) => spots[byId.get(id)]);
    if (!nodes.length) continue;
    const row = html("div", { className: "supernode" }, one("#groups"));
    const label = html("label", { textContent: "Name " }, row);
    const input = html("input", { type: "text", value: harmless(group.name), maxLength: 80, autocomplete: "off" }, label);
    html("span", { className: "members", textContent: nodes.map(titled).join(", ") }, row);
    const apart = html("button", { type: "button", className: "plain", textContent: "Ungroup", ariaLabel: `Ungroup ${harmless(group.name)}` }, row);
    input.addEventListener("change", () => {
      group.name = freeName(input.value, group);
      showAll(false);
    });
    apart.addEventListener("click", () => {
      groups.splice(groups.indexOf(group), 1);
      showAll(false);
    });
  }
  drawSub();
};
one("#grouping").addEventListener("submit", (event) => {
  event.preventDefault();
  if (!ticked.size) {
    one("#pin-count").textContent = "Tick the pinned nodes that belong together first.";
    return;
  }
  groups.push({ name: freeName(one("#group-name").value), members: [...ticked].map((i) => spots[i].node_id) });
  ticked.clear();
  one("#group-name").value = "";
  showAll(false);
});
one("#unpin").addEventListener("click", () => {
  pins.clear();
  groups.splice(0);
  showAll(false);
});

// --- the graph as its file, with what was pinned and grouped

one("#save").addEventListener("click", () => {
  const ids = spots.map((spot) => spot.node_id);
  const saved = {
    ...record,
    qParams: { ...record.qParams, pinnedIds: [...pins], supernodes: groups.map(({ name, members }) => [name, ...members]) },
    links: links.map(({ source, target, weight }, i) => ({ source: ids[source], target: ids[target], weight, ...(data.parts && { parts: data.parts[i] }) })),
  };
  const file = new Blob([JSON.stringify(saved, null, 1)], { type: "application/json" });
  const link = html("a", { href: URL.createObjectURL(file), download: `${record.metadata.slug.replace(/[^\p{L}\p{N}._-]+/gu, "_") || "graph"}.json` });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60000);
});

// --- sliders and the first drawing

const limit = Math.max(1, Math.min(data.most, data.rankings.influence[1].length));
state.count = Math.min(data.opens, data.rankings.influence[1].length);
Object.assign(one("#node-slider"), { max: Math.max(limit, state.count), value: state.count });
Object.assign(one("#link-slider"), { max: Math.min(1000, links.length), value: Math.min(state.lines, links.length) });
one("#node-slider").addEventListener("input", (event) => { state.count = +event.target.value; showAll(true); });
one("#link-slider").addEventListener("input", (event) => { state.lines = +event.target.value; showAll(true); });
for (const input of all("input[name=by]")) input.addEventListener("change", () => { state.by = input.value; showAll(true); });
one("#undrawn").remove();
one("#drawing").hidden = one("#pinned").hidden = false;
showAll(true);
one(".field").scrollLeft = one(".field").scrollWidth;  // where the answer stands
let known = net.parentElement.clientWidth;
new ResizeObserver(() => {
  if (Math.abs(net.parentElement.clientWidth - known) < 20) return;
  known = net.parentElement.clientWidth;
  showAll(true);
}).observe(net.parentElement);
document.documentElement.dataset.ready = "yes";
