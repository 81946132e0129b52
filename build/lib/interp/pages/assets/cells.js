// --- tables of positions: every cell knows its token and names its place, which the page does not repeat -------------

for (const row of all("[data-cells] tbody tr")) {
  const [place, ...rest] = row.cells;
  rest.forEach((cell, pos) => {
    Object.assign(cell.dataset, { cell: "", pos });
    cell.title = `${place.dataset.place} at ${data.names[pos]} (${pos})\n${cell.title}`;
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && event.target.matches("td[data-pos]")) select({ pos: +event.target.dataset.pos });
});
