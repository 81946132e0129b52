// --- tables of positions: every cell knows its token and names its place, which the page does not repeat -------------

for (const row of all("[data-cells] tbody tr")) {
  const [place, ...rest] = row.cells;
  rest.forEach((cell, pos) => {
    Object.assign(cell.dataset, { cell: "", pos });
    cell.title = `${place.dataset.place} at ${data.names[pos]} (${pos})\n${cell.title}`;
    cell.addEventListener("keydown", (event) => event.key === "Enter" && select({ pos }));
  });
}
