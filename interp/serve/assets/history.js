// --- the list of edits, with undo and redo -------------------------------------------------------------------------
// An edit is the package's own record as JSON: { where: "L3H5", change: "zero", at: { pos: [3, 4] } }.

const names = {
  head: (layer, head) => `L${layer}H${head}`,
  mlp: (layer) => `L${layer}.mlp`,
  neuron: (layer, neuron) => `L${layer}N${neuron}`,
  stream: (layer) => `L${layer}.resid`,
};
// Which part an edit changes; a cut edge is its head's.
const partOf = ({ where, at }) => {
  const [, layer, letter, index, site] = where.match(/^L(\d+)(?:([HN])(\d+)|\.(\w+))$/);
  if (site) return { layer: +layer, kind: site, head: at?.head };
  return { layer: +layer, kind: letter === "H" ? "head" : "neuron", [letter === "H" ? "head" : "neuron"]: +index };
};

const past = [[]];
let now = 0;
const edits = () => past[now];

const forgets = [];
const changed = () => {
  forgets.forEach((forget) => forget());
  showEdits();
  listEdits();
  refresh();
};
const change = (next, amends = false) => {
  if (next.length > data.most_edits) return complain(`At most ${data.most_edits} edits.`);
  if (!amends) now++;
  past.splice(now, past.length, next);
  changed();
};
const go = (step) => {
  if (past[now + step] === undefined) return;
  now += step;
  changed();
};

// One place takes one edit; an edge is cut in the pattern or in the scores, not in both.
const spot = ({ where, at }) => JSON.stringify([where.replace(".attn_scores", ".pattern"), at]);
const put = (edit, amends) => change([...edits().filter((other) => spot(other) !== spot(edit)), edit], amends);
const drop = (edit) => {
  const left = edits().filter((other) => spot(other) !== spot(edit));
  if (left.length < edits().length) change(left);
};
const has = (edit) => edits().find((other) => spot(other) === spot(edit));

const showEdits = () => {
  one("#undo").disabled = now === 0;
  one("#redo").disabled = now === past.length - 1;
  one("#clear").disabled = edits().length === 0;
};
// The server says an edit in words; until it has, the part is named.
const words = new Map();
let sent = [];
const learnt = () => {
  sent.forEach((edit, i) => words.set(JSON.stringify(edit), shown.edits[i]));
  listEdits();
};
const listEdits = () => {
  const items = edits().map((edit) => {
    const item = document.createElement("li");
    const button = Object.assign(document.createElement("button"), { type: "button", textContent: "×" });
    const text = words.get(JSON.stringify(edit)) ?? `${edit.where} …`;
    button.setAttribute("aria-label", `take back: ${text}`);
    button.addEventListener("click", () => drop(edit));
    item.append(text, button);
    return item;
  });
  const none = Object.assign(document.createElement("li"), { className: "none", textContent: "no edits yet" });
  const list = one("#edits");
  const more = items.length > list.querySelectorAll("button").length;
  list.replaceChildren(...(items.length ? items : [none]));
  if (more) list.scrollLeft = list.scrollWidth;
};

one("#undo").addEventListener("click", () => go(-1));
one("#redo").addEventListener("click", () => go(1));
one("#clear").addEventListener("click", () => change([]));
addEventListener("keydown", (event) => {
  if (!(event.ctrlKey || event.metaKey) || event.target.matches("textarea, input[type=text], input[type=number]")) return;
  const key = event.key.toLowerCase();
  if (key !== "z" && key !== "y") return;
  event.preventDefault();
  go(key === "y" || event.shiftKey ? 1 : -1);
});
views.push(learnt);
