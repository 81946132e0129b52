// --- maps with too many cells for a number in each: painted, with the number of the cell that is pointed at ---------

const ROW = [5, 20];  // heights of a row, in pixels
const TALLEST = 560;
const channels = (name) => [1, 3, 5].map((i) => parseInt(style(`--${name}`).slice(i, i + 2), 16));
const mixed = (full, ground, share) => `rgb(${full.map((x, i) => Math.round(ground[i] + (x - ground[i]) * share))})`;

// A grid on a canvas: cells that are pointed at, walked over with arrow keys, chosen by a click or Enter.
const paintedGrid = (canvas, { rows, columns, frame, start, draw, told, choose }) => {
  let cursor = null;
  const under = (event) => {
    const box = canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - frame.left) / frame.width);
    const row = Math.floor((event.clientY - box.top - frame.top) / frame.height);
    return row >= 0 && row < rows && column >= 0 && column < columns ? { row, column } : null;
  };
  const tell = (cell) => {
    const box = canvas.getBoundingClientRect();
    const [x, y] = [box.left + frame.left + (cell.column + 0.5) * frame.width, box.top + frame.top + cell.row * frame.height];
    canvas.dataset.tip = told(cell);
    canvas.setAttribute("aria-description", canvas.dataset.tip);
    showTip(canvas, null, new DOMRect(x, y, 0, frame.height));
  };
  const drawAll = () => {
    const room = (canvas.closest(".columns > *, .columns .painting") ?? canvas.parentElement).clientWidth;
    if (!room) return;  // hidden: drawn when it is shown
    const context = canvas.getContext("2d");
    draw(context, room, (width, height) => {
      const dense = window.devicePixelRatio || 1;
      [canvas.width, canvas.height] = [Math.round(width * dense), Math.round(height * dense)];
      [canvas.style.width, canvas.style.height] = [`${width}px`, `${height}px`];
      Object.assign(canvas.dataset, frame);
      context.scale(dense, dense);
    });
    if (cursor) outlined(context, frame, cursor.row, cursor.column);
    for (const place of (canvas.dataset.spoken ?? "").split(" ").filter(Boolean)) {
      outlined(context, frame, ...place.split(",").map(Number), frame.height, "--accent", 3);
    }
  };
  const shown = (cell) => {
    cursor = cell;
    drawAll();
  };
  canvas.addEventListener("pointermove", (event) => {
    const cell = under(event);
    canvas.classList.toggle("over", Boolean(cell));
    if (cell) tell(cell);
    else hideTip();
  });
  canvas.addEventListener("pointerleave", () => hideTip());
  canvas.addEventListener("click", (event) => under(event) && choose(under(event)));
  canvas.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && cursor) return choose(cursor);
    const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
    if (!step) return undefined;
    event.preventDefault();
    const at = cursor ?? start();
    const within = (x, end) => Math.max(0, Math.min(end - 1, x));
    shown(cursor ? { row: within(at.row + step[0], rows), column: within(at.column + step[1], columns) } : at);
    return tell(cursor);
  });
  canvas.addEventListener("blur", () => {
    hideTip();
    shown(null);
  });
  canvas.addEventListener("spoken", drawAll);
  new ResizeObserver(drawAll).observe(canvas.parentElement);
  drawings.push(drawAll);
  let chosen = "";
  views.push(() => {  // other views follow the pointer, this one what is chosen
    const now = [state.layer, state.head, state.pos].join();
    if (now !== chosen) drawAll();
    chosen = now;
  });
};
const outlined = (context, frame, row, column, height = frame.height, ink = "--ink", width = 1.5) => {
  context.strokeStyle = style(ink);
  context.lineWidth = width;
  context.strokeRect(frame.left + column * frame.width - 1, frame.top + row * frame.height - 1, frame.width + 1, height + 1);
};
const rowNames = (context, frame, rows) => {
  context.font = `10px ${style("--sans")}`;
  context.textBaseline = "middle";
  context.fillStyle = style("--muted");
  const every = Math.ceil(12 / frame.height);
  for (let row = 0; row < rows; row += every) context.fillText(`L${row}`, 0, frame.top + (row + 0.5) * frame.height);
};
const columnNames = (context, frame, names, turned) => {
  const every = Math.ceil(11 / frame.width);
  names.forEach((name, column) => {
    if (column % every) return;
    context.save();
    context.translate(frame.left + (column + 0.5) * frame.width, frame.top - 5);
    if (turned) context.rotate(-Math.PI / 2);
    context.textAlign = turned ? "left" : "center";
    context.fillText(name, 0, turned ? 0 : -4, turned ? 60 : undefined);
    context.restore();
  });
};

const paintedMap = (canvas) => {
  const { over, mlps, unit, marked } = canvas.dataset;
  const levels = unpacked(canvas.dataset.levels, Int8Array);
  const thousandths = unpacked(canvas.dataset.values, canvas.dataset.bytes === "2" ? Int16Array : Int32Array);
  const nothing = -(2 ** (8 * thousandths.BYTES_PER_ELEMENT - 1));
  const columns = +canvas.dataset.columns;
  const rows = levels.length / columns;
  const marks = new Set(marked.split(" ").filter(Boolean).map(Number));
  const extra = mlps.split(" ").filter(Boolean);
  const heads = columns - extra.length;
  const sequential = Boolean(canvas.closest("[data-score]"));
  const frame = { left: 30, top: 18, width: 1, height: 1 };
  const ofTokens = over === "tokens";
  const columnName = (column) => (ofTokens ? data.names[column] : column < heads ? `H${column}` : extra[column - heads] === "mlp" ? "MLP" : "MLP 1");
  const cellName = (row, column) =>
    ofTokens ? `layer ${row} at ${data.names[column]} (${column})` : column < heads ? headName(row, column) : `L${row}.${extra[column - heads]}`;
  const told = ({ row, column }) => {
    const [level, value] = [levels, thousandths].map((each) => each[row * columns + column]);
    const what = value === nothing || level === -128 ? "nothing was measured or changed here"
      : `${value > 0 && !sequential ? "+" : ""}${number(value / 1000, 3)} ${unit}`;
    return `${cellName(row, column)}\n${what}${marks.has(row * columns + column) ? "\ncounts as an induction head" : ""}`;
  };

  const draw = (context, room, resized) => {
    context.font = `10px ${style("--sans")}`;
    const names = Array.from({ length: columns }, (_, i) => columnName(i));
    const longest = Math.max(...names.map((name) => context.measureText(name).width));
    frame.width = Math.min(ofTokens ? 46 : 34, (room - frame.left - 2) / columns);
    const turned = longest + 4 > frame.width;
    frame.top = turned ? Math.min(64, Math.ceil(longest) + 8) : 18;
    frame.height = Math.max(ROW[0], Math.min(ROW[1], TALLEST / rows));
    resized(frame.left + columns * frame.width + 2, frame.top + rows * frame.height + 2);
    rowNames(context, frame, rows);
    columnNames(context, frame, names, turned);
    const inks = Object.fromEntries(["panel", "pos", "neg", "seq"].map((name) => [name, channels(name)]));
    const [soft, ink] = [style("--soft"), style("--ink")];
    const gap = Math.min(frame.width, frame.height) >= 7 ? 1 : 0;
    levels.forEach((level, i) => {
      const [x, y] = [frame.left + (i % columns) * frame.width, frame.top + Math.floor(i / columns) * frame.height];
      const full = sequential ? inks.seq : level < 0 ? inks.neg : inks.pos;
      context.fillStyle = level === -128 ? soft : mixed(full, inks.panel, Math.abs(level) / 127);
      context.fillRect(x, y, frame.width - gap, frame.height - gap);
      if (!marks.has(i)) return;
      context.fillStyle = ink;
      context.fillRect(x + frame.width / 2 - 2, y + frame.height / 2 - 2, 3, 3);
    });
    context.strokeStyle = style("--line");
    context.strokeRect(frame.left - 1, frame.top - 1, columns * frame.width + 1, rows * frame.height + 1);
    if (ofTokens) outlined(context, frame, 0, state.pos, rows * frame.height);
    else outlined(context, frame, state.layer, state.head);
  };
  const choose = ({ row, column }) => {
    if (ofTokens) select({ pos: column, cell: null });
    else if (column < heads) select({ layer: row, head: column, part: headName(row, column) });
  };
  const start = () => (ofTokens ? { row: 0, column: state.pos } : { row: state.layer, column: state.head });
  paintedGrid(canvas, { rows, columns, frame, start, draw, told, choose });
};
all("canvas.painted[data-levels]").forEach(paintedMap);

// The patterns of all heads, where there are too many for an element each.
const paintedPatterns = (canvas) => {
  const [rows, columns] = [data.profiles.length, data.heads];
  const frame = { left: 30, top: 18, width: 1, height: 1 };
  const own = Object.assign(document.createElement("canvas"), { width: n, height: n });
  const told = ({ row, column }) => `${headName(row, column)}\n${data.profiles[row][column]}`;
  const draw = (context, room, resized) => {
    const side = Math.max(7, Math.min(44, (room - frame.left - 2) / columns, TALLEST / rows));
    const turned = columns > 9 && side < 24;
    Object.assign(frame, { width: side, height: side, top: turned ? 28 : 18 });
    resized(frame.left + columns * side + 2, frame.top + rows * side + 2);
    rowNames(context, frame, rows);
    columnNames(context, frame, Array.from({ length: columns }, (_, head) => `H${head}`), turned);
    context.imageSmoothingEnabled = side < n;
    for (let row = 0; row < rows; row++) {
      for (let column = 0; column < columns && looks(row); column++) {
        drawThumbnail(own.getContext("2d"), row, column);
        context.drawImage(own, frame.left + column * side, frame.top + row * side, side - 1, side - 1);
      }
    }
    outlined(context, frame, state.layer, state.head);
  };
  const choose = ({ row, column }) => select({ layer: row, head: column, part: headName(row, column) });
  paintedGrid(canvas, { rows, columns, frame, start: () => ({ row: state.layer, column: state.head }), draw, told, choose });
};
if (data.attention && one("#patterns")) paintedPatterns(one("#patterns"));
