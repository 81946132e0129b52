Object.assign(state, { part: "head", layer: null, head: 0, neuron: 0, at: null, answer: null, pointed: null });
// Until a part is chosen the server says which matters most.
for (const cell of all("button.cell")) explain(cell, "");
for (const table of all("#attribution .map")) {
  table.style.minWidth = `${1.8 + 2.15 * (data.heads + data.mlp)}rem`;
}
redraw();
showEdits();
refresh();
