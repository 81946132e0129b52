// One state, views that follow it. Tables and texts are in the page already; this draws attention and links the views.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const n = data.names.length;
  const one = (selector, root = document) => root.querySelector(selector);
  const all = (selector, root = document) => [...root.querySelectorAll(selector)];

  const state = { layer: 0, head: 0, pos: n - 1, pointed: null, key: null, direction: "from", node: null, edges: 0 };
  const views = [];
  const select = (change) => {
    Object.assign(state, change);
    views.forEach((view) => view());
  };

  // --- attention weights: the lower triangle of every head, row by row, as unsigned integers -------------------------

  const bytes = Uint8Array.from(atob(data.attention.cells), (c) => c.charCodeAt(0));
  const cells = data.attention.bytes === 2 ? new Uint16Array(bytes.buffer) : bytes;
  const most = data.attention.bytes === 2 ? 65535 : 255;
  const triangle = (n * (n + 1)) / 2;
  const weight = (layer, head, query, key) =>
    key > query ? 0 : cells[(layer * data.heads + head) * triangle + (query * (query + 1)) / 2 + key] / most;

  const number = (x, digits) => {
    const text = x.toFixed(digits);
    return Number(text) === 0 ? text.replace("-", "") : text.replace("-", "−");
  };
  const probability = (p) => (p > 0 && p < 0.0005 ? "<0.001" : number(p, 3));

  // --- colours -------------------------------------------------------------------------------------------------------

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  let ramp;
  const readRamp = () => {
    const stops = [0, 1, 2].map((i) => style(`--ramp-${i}`).split(/\s+/).map(Number));
    ramp = Array.from({ length: 256 }, (_, i) => {
      const [a, b] = i < 128 ? [stops[0], stops[1]] : [stops[1], stops[2]];
      const t = (i < 128 ? i : i - 128) / (i < 128 ? 128 : 127);
      return a.map((x, c) => Math.round(x + (b[c] - x) * t));
    });
  };
  const colour = (value) => ramp[Math.round(255 * value)];

  const shade = (element, value) => {
    element.style.setProperty("--v", value.toFixed(3));
    element.classList.toggle("hi", value > 0.78);
  };

  // --- thumbnails ----------------------------------------------------------------------------------------------------

  const drawThumbnails = () => {
    for (const button of all(".thumb")) {
      const [layer, head] = [+button.dataset.layer, +button.dataset.head];
      const context = one("canvas", button).getContext("2d");
      const image = context.createImageData(n, n);
      for (let query = 0; query < n; query++) {
        for (let key = 0; key <= query; key++) {
          image.data.set([...colour(weight(layer, head, query, key)), 255], 4 * (query * n + key));
        }
      }
      context.putImageData(image, 0, 0);
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
    for (let q = 0; q < n; q++) {
      for (let k = 0; k <= q; k++) {
        context.fillStyle = `rgb(${colour(weight(state.layer, state.head, q, k))})`;
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
    drawLabels(context, query);
  };

  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const key = Math.floor((event.clientX - box.left - frame.margin) / frame.cell);
    const query = Math.floor((event.clientY - box.top - frame.top) / frame.cell);
    return key >= 0 && key <= query && query < n ? { query, key } : null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const cell = under(event);
    if (!cell) return select({ pointed: null, key: null });
    const [pointed, key] = state.direction === "from" ? [cell.query, cell.key] : [cell.key, cell.query];
    if (pointed !== state.pointed || key !== state.key) select({ pointed, key });
  });
  canvas.addEventListener("pointerleave", () => select({ pointed: null, key: null }));
  canvas.addEventListener("click", () => state.pointed !== null && select({ pos: state.pointed }));

  // --- the views that follow the state -------------------------------------------------------------------------------

  const showHead = () => {
    one("#head-name").textContent = `Layer ${state.layer}, head ${state.head}`;
    for (const element of all("[data-layer][data-head]")) {
      const chosen = +element.dataset.layer === state.layer && +element.dataset.head === state.head;
      element.classList.toggle("chosen", chosen);
      if (element.matches("button.thumb, button.cell, button.step")) element.setAttribute("aria-pressed", chosen);
      if (chosen && element.matches(".thumb")) {
        one("#head-profile").textContent = element.dataset.tip.split("\n").slice(1).join(" · ");
      }
    }
  };

  const showAttention = () => {
    const at = state.pointed ?? state.pos;
    const from = state.direction === "from";
    const values = data.names.map((_, i) =>
      from ? weight(state.layer, state.head, at, i) : weight(state.layer, state.head, i, at));
    all("#attended .chip").forEach((chip, i) => {
      const unseen = from ? i > at : i < at;
      shade(chip, values[i]);
      one("small", chip).textContent = unseen ? "–" : number(values[i], 3);
      chip.classList.toggle("unseen", unseen);
      chip.classList.toggle("chosen", i === at);
      chip.classList.toggle("pointed", i === state.key);
    });
    const shown = state.key ?? values.indexOf(Math.max(...values));
    const most = state.key === null ? " most" : "";
    const [query, key] = from ? [at, shown] : [shown, at];
    one("#readout").textContent =
      `${data.names[query]} (${query}) looks${from ? most : ""} at ${data.names[key]} (${key}): ${number(values[shown], 4)}`;
    drawPattern();
  };

  const showNext = () => {
    one("#next-of").textContent = data.names[state.pos];
    one("#next-pos").textContent = state.pos;
    const ends = state.pos === n - 1;
    const rows = data.nexts[state.pos].map(([token, prob, logit], rank) => {
      const row = document.createElement("tr");
      row.classList.toggle("actual", rank === data.ranks[state.pos]);
      for (const text of [rank, token, number(logit, 2), probability(prob), ""]) {
        row.append(Object.assign(document.createElement("td"), { textContent: text }));
      }
      row.children[1].className = "tok";
      row.children[4].className = "bar";
      row.children[4].append(document.createElement("i"));
      row.children[4].firstChild.style.width = `${100 * prob}%`;
      return row;
    });
    one("#next tbody").replaceChildren(...rows);
    const what = ends ? `The answer asked about is ${data.answer}` : `The prompt goes on with ${data.names[state.pos + 1]}`;
    one("#next-actual").textContent = `${what}, rank ${data.ranks[state.pos]}.`;
    for (const element of all("#losses .chip, .lens thead th, #patching thead th")) {
      element.classList.toggle("chosen", +element.dataset.pos === state.pos);
    }
  };

  const showMoved = () => {
    const { layer, head } = state;
    const moved = data.moved[layer][head];
    const signed = (x, digits) => (Number(x.toFixed(digits)) > 0 ? "+" : "") + number(x, digits);
    one("#moved-name").textContent = `What head ${layer}.${head} moves to the end, by token it comes from`;
    one("#moved-sum").textContent = `Logits, together ${signed(moved.reduce((a, b) => a + b, 0), 3)}: the head's cell above.`;
    all("#moved .chip").forEach((chip, i) => {
      shade(chip, Math.min(1, Math.abs(moved[i]) / data.reach));
      chip.classList.toggle("neg", moved[i] < 0);
      one("small", chip).textContent = signed(moved[i], 3);
    });
  };

  // As many of the strongest edges as wanted; those of the chosen part stand out, parts without any step back.
  const showCircuit = () => {
    const reached = new Set();
    for (const element of all("[data-rank]")) {
      const ends = element.dataset.ends.split(" ");
      const shown = +element.dataset.rank < state.edges;
      element.toggleAttribute("hidden", !shown);
      element.classList.toggle("lit", ends.includes(state.node));
      if (shown) ends.forEach((end) => reached.add(end));
    }
    one(".graph").classList.toggle("focused", reached.has(state.node));
    for (const node of all(".node")) {
      const picked = node.dataset.node === state.node;
      node.classList.toggle("apart", !reached.has(node.dataset.node));
      node.classList.toggle("picked", picked);
      node.setAttribute("aria-pressed", picked);
    }
  };

  // A model without logits has neither next tokens nor an answer.
  views.push(showHead, showAttention, ...(data.nexts ? [showNext, showMoved] : []), ...(one(".graph") ? [showCircuit] : []));

  // --- choosing heads and tokens -------------------------------------------------------------------------------------

  const choosePart = (part) => {
    const { layer, head, node = `a${layer}.h${head}` } = part.dataset;
    const again = part.matches(".node") && node === state.node;
    select({ ...(head && { layer: +layer, head: +head }), node: again ? null : node });
  };
  document.addEventListener("click", (event) => {
    const part = event.target.closest("button[data-head], [data-node]");
    if (part) choosePart(part);
    const token = event.target.closest(":is(.chip, #patching button)[data-pos]");
    if (token) select({ pos: +token.dataset.pos });
  });
  for (const node of all(".node")) {
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
  onChange("direction", (direction) => select({ direction, pointed: null, key: null }));
  onChange("edges", (edges) => select({ edges: +edges }));

  for (const name of ["score", "circuit", "kind", "grain", "matrix", "patching"]) {
    const show = (choice) => all(`[data-${name}]`).forEach((part) => { part.hidden = part.dataset[name] !== choice; });
    onChange(name, show);
    show(one(`input[name=${name}]`)?.value);
  }

  const orderComponents = (order) => {
    const body = one("#components tbody");
    const rows = all("tr", body).sort((a, b) =>
      order === "depth" ? a.dataset.order - b.dataset.order : Math.abs(b.dataset.logits) - Math.abs(a.dataset.logits));
    let sum = 0;
    const spans = rows.map((row) => [sum, (sum += +row.dataset.logits)]);
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
  onChange("order", orderComponents);

  // --- keyboard: one tab stop per grid, arrows inside ----------------------------------------------------------------

  for (const grid of all("[data-grid]")) {
    const items = all("[data-cell]", grid);
    const columns = +grid.dataset.grid;
    items.forEach((item, i) => { item.tabIndex = i ? -1 : 0; });
    grid.addEventListener("focusin", (event) => {
      if (items.includes(event.target)) items.forEach((item) => { item.tabIndex = item === event.target ? 0 : -1; });
    });
    grid.addEventListener("keydown", (event) => {
      const at = items.indexOf(document.activeElement);
      const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns, Home: -at, End: items.length - 1 - at };
      const next = items[at + steps[event.key]];
      if (at < 0 || !next) return;
      event.preventDefault();
      next.focus();
    });
  }

  // --- explanations on hover and focus: the titles, shown at once and in our type ------------------------------------

  const tip = one("#tip");
  const showTip = (element, pointer) => {
    tip.textContent = element.dataset.tip;
    tip.hidden = false;
    const box = element.getBoundingClientRect();
    // A line can be long: its explanation stands where it is pointed at.
    const at = pointer && element.matches(".edge") ? new DOMRect(pointer.clientX, pointer.clientY, 0, 0) : box;
    const size = tip.getBoundingClientRect();
    const above = at.top > size.height + 12;
    tip.style.top = `${above ? at.top - size.height - 7 : at.bottom + 7}px`;
    tip.style.left = `${Math.max(8, Math.min(at.left + at.width / 2 - size.width / 2, innerWidth - size.width - 8))}px`;
  };
  const hideTip = () => { tip.hidden = true; };
  const explain = (element, text) => {
    element.dataset.tip = text;
    element.setAttribute("aria-description", text);
    element.addEventListener("pointerenter", (event) => showTip(element, event));
    element.addEventListener("focus", () => element.matches(":focus-visible") && showTip(element));
    element.addEventListener("pointerleave", hideTip);
    element.addEventListener("blur", hideTip);
  };
  for (const element of all("[title]")) {
    explain(element, element.title);
    element.removeAttribute("title");
  }
  for (const title of all("svg title")) {
    explain(title.parentElement, title.textContent);
    title.remove();
  }
  addEventListener("scroll", hideTip, { capture: true, passive: true });
  addEventListener("keydown", (event) => event.key === "Escape" && hideTip());

  // --- drawing anew when colours or widths change --------------------------------------------------------------------

  const redraw = () => { readRamp(); drawThumbnails(); drawPattern(); };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  new ResizeObserver(drawPattern).observe(one(".large"));
  addEventListener("beforeprint", () => {
    document.documentElement.dataset.theme = "light";
    redraw();
  });
  addEventListener("afterprint", () => { delete document.documentElement.dataset.theme; redraw(); });

  one("#unscripted").remove();
  readRamp();
  drawThumbnails();
  select({ layer: data.first[0], head: data.first[1], edges: +(one("input[name=edges]:checked")?.value ?? 0) });
})();
