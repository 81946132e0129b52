// --- the circuit: how many edges, which parts share a box, which are pinned, and where they were put -----------------

state.pins = new Set();
const drawCircuit = () => {
  const signed = (x) => (Number(x.toFixed(3)) > 0 ? "+" : "") + number(x, 3);
  const graphs = all(".graph");
  for (const path of all(".graph :is(.edge, .bundle) path")) {
    const reach = path.cloneNode();  // a wide line that nobody sees, to point at
    reach.classList.add("reach");
    path.before(reach);
  }
  const wide = [0.7, 8];  // the weakest line and the strongest, in pixels
  const rows = all("#edges tbody tr");
  const ranked = (text) => text.split(" ").filter(Boolean).map((rank) => rows[rank]).filter((row) => linked(row));
  const linked = (element) => element.dataset.drawn && +element.dataset.drawn <= state.edges;
  const sum = (scores) => scores.reduce((a, b) => a + b, 0);

  // --- the lines that are there, and what they carry

  // Every bundle's sum over the edges that are drawn now; its explanation names the largest of them.
  const addUp = (graph) => {
    const bundles = all(".bundle", graph);
    const sums = bundles.map((bundle) => {
      const parts = ranked(bundle.dataset.ranks);
      const scores = parts.map((row) => +row.dataset.score);
      const total = sum(scores);
      bundle.toggleAttribute("hidden", !parts.length);
      bundle.classList.toggle("neg", total < 0);
      const [up, down] = [scores.filter((x) => x > 0), scores.filter((x) => x < 0)];
      const both = up.length && down.length ? ` (${signed(sum(up))} and ${signed(sum(down))})` : "";
      const said = parts.length === 1 ? "one edge" : `the sum of ${parts.length} edges${both}`;
      const named = parts.slice(0, 5).map((row) => `${row.cells[0].textContent} → ${row.cells[1].textContent} ${row.cells[2].textContent}`);
      const more = parts.length > 5 ? [`and ${parts.length - 5} smaller`] : [];
      bundle.dataset.tip = [bundle.dataset.name, `${signed(total)} logits, ${said}`, ...named, ...more].join("\n");
      bundle.setAttribute("aria-label", `${bundle.dataset.name}: ${signed(total)} logits, ${said}`);
      bundle.removeAttribute("aria-description");
      return Math.abs(total);
    });
    const most = Math.max(...sums) || 1;
    bundles.forEach((bundle, i) => bundle.lastElementChild.setAttribute("stroke-width", (wide[0] + (wide[1] - wide[0]) * sums[i] / most).toFixed(2)));
    for (const node of all(".node", graph)) {
      const inside = ranked(node.dataset.inside);
      const words = inside.length ? `\n${inside.length === 1 ? "one edge" : `${inside.length} edges`} inside, not drawn: ${signed(sum(inside.map((row) => +row.dataset.score)))} logits` : "";
      node.dataset.meaning ??= node.dataset.tip;
      node.dataset.tip = node.dataset.meaning + words;
      node.setAttribute("aria-description", node.dataset.tip);
    }
  };

  const showGraph = (graph) => {
    for (const edge of all(".edge", graph)) edge.toggleAttribute("hidden", !linked(edge));
    addUp(graph);
    const nodes = all(".node", graph);
    const picked = nodes.filter(({ dataset: { part, members } }) => state.pins.has(part) || part === state.part || members.split(" ").includes(state.part));
    const names = new Set(picked.map((node) => node.dataset.part));
    const reached = new Set();
    for (const line of all(".edge, .bundle", graph)) {
      const ends = line.dataset.ends.split(" ");
      line.classList.toggle("lit", ends.some((end) => names.has(end)));
      if (!line.hasAttribute("hidden")) ends.forEach((end) => reached.add(end));
    }
    graph.classList.toggle("focused", [...names].some((name) => reached.has(name)));
    for (const node of nodes) {
      const { part, inside } = node.dataset;
      node.classList.toggle("apart", !reached.has(part) && !ranked(inside).length);
      node.classList.toggle("picked", names.has(part));
      node.classList.toggle("pinned", state.pins.has(part));
      node.setAttribute("aria-pressed", names.has(part));
    }
    for (const grid of all("[data-grid]", graph)) {
      const cells = all("[data-cell]:not([hidden])", grid);
      if (cells.length && !cells.some((cell) => cell.tabIndex === 0)) cells[0].tabIndex = 0;
    }
    return picked;
  };

  const showCircuit = () => {
    const how = one("input[name=together]:checked");
    const wanted = new Set([state.part]);
    for (const graph of graphs) {
      const shown = graph.dataset.together === how.value;
      graph.toggleAttribute("hidden", !shown);
      const picked = showGraph(graph);
      if (shown) picked.forEach((node) => node.dataset.members.split(" ").forEach((part) => wanted.add(part)));
    }
    rows.forEach((row, rank) => {
      row.hidden = rank >= state.edges;
      row.classList.toggle("apart", !linked(row));
      row.classList.toggle("lit", row.dataset.ends.split(" ").some((end) => wanted.has(end)));
    });
    one("#carried").textContent = `${one("input[name=edges]:checked").dataset.carried} ${how.dataset.meaning}`.trim();
    one("#unpin").hidden = !state.pins.size;
  };

  // --- moving: a box stays in the drawing, in its row, and off every other box

  const STEP = 12;  // of one key press, in pixels
  const home = ({ dataset: { x, y } }) => [+x, +y];
  const place = (node) => node.place ?? home(node);
  const fits = (node, x, y) => {
    const { width, height } = node.ownerSVGElement.viewBox.baseVal;
    const inside = x >= 84 && x <= width - 40 && Math.abs(y - home(node)[1]) <= 20 && y >= 12 && y <= height - 12;
    return inside && all(".node", node.ownerSVGElement).every((other) => {
      const [a, b] = place(other);
      return other === node || Math.abs(a - x) >= 76 || Math.abs(b - y) >= 24;
    });
  };
  // A line keeps its way through the gaps; its first and last bend follow the boxes.
  const redraw = (line, nodes) => {
    const [source, ...targets] = line.dataset.ends.split(" ").map((end) => {
      const node = nodes.get(end);
      return place(node).map((value, i) => value - home(node)[i]);
    });
    line.dataset.way ??= line.firstElementChild.getAttribute("d");
    const ways = line.dataset.way.split("M").slice(1).map((way, i) => {
      const last = way.match(/-?[\d.]+/g).length;
      let at = -1;
      return "M" + way.replace(/-?[\d.]+/g, (value) => {
        at += 1;
        const shift = at < 4 ? source[at % 2] : at >= last - 4 ? targets[i][(last - at) % 2] : 0;
        return (+value + shift).toFixed(1);
      });
    });
    for (const path of all("path", line)) path.setAttribute("d", ways.join(" "));
  };
  const put = (node, x, y) => {
    node.place = [x, y];
    node.setAttribute("transform", `translate(${x.toFixed(1)} ${y.toFixed(1)})`);
    const graph = node.ownerSVGElement;
    const nodes = new Map(all(".node", graph).map((each) => [each.dataset.part, each]));
    for (const line of all(".edge, .bundle", graph)) {
      if (line.dataset.ends.split(" ").includes(node.dataset.part)) redraw(line, nodes);
    }
    one("#unmove").hidden = false;
  };

  let held = null;
  for (const node of all(".graph .node")) {
    const at = (event) => new DOMPoint(event.clientX, event.clientY).matrixTransform(node.ownerSVGElement.getScreenCTM().inverse());
    node.addEventListener("pointerdown", (event) => {
      if (event.button) return;
      const [from, [x, y]] = [at(event), place(node)];
      held = { node, from, x, y, moved: false };
    });
    node.addEventListener("pointermove", (event) => {
      if (held?.node !== node || !event.buttons) return;
      const to = at(event);
      const [dx, dy] = [to.x - held.from.x, to.y - held.from.y];
      if (!held.moved && Math.hypot(dx, dy) < 4) return;
      if (!held.moved) node.setPointerCapture(event.pointerId);
      held.moved = true;
      node.dispatchEvent(new Event("pointerleave"));  // no explanation meanwhile
      const [y0, x] = [home(node)[1], held.x + dx];
      const y = Math.max(y0 - 20, Math.min(y0 + 20, held.y + dy));
      if (fits(node, x, y)) put(node, x, y);
    });
    // The click that ends a drag is none.
    node.addEventListener("click", (event) => {
      if (held?.moved) event.stopPropagation();
      held = null;
    });
    node.addEventListener("keydown", (event) => {
      const way = { ArrowLeft: [-STEP, 0], ArrowRight: [STEP, 0], ArrowUp: [0, -STEP], ArrowDown: [0, STEP] }[event.key];
      if (!way || !event.shiftKey) return;
      event.preventDefault();
      event.stopPropagation();
      const [x, y] = place(node);
      const to = Array.from({ length: 99 }, (_, i) => [x + (i + 1) * way[0], y + (i + 1) * way[1]]).find(([a, b]) => fits(node, a, b));
      if (to) put(node, ...to);
    });
  }
  one("#unpin").textContent = "unpin all";
  one("#unmove").textContent = "move all back";
  one("#unpin").addEventListener("click", () => {
    const part = state.pins.has(state.part) ? null : state.part;
    state.pins.clear();
    select({ part });
  });
  one("#unmove").addEventListener("click", () => {
    all(".graph .node").filter((node) => node.place).forEach((node) => put(node, ...home(node)));
    one("#unmove").hidden = true;
  });
  for (const input of all("input[name=together]")) input.addEventListener("change", () => select({}));
  views.push(showCircuit);
};
if (one(".graph")) drawCircuit();
