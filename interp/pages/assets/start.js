redraw();
select({ layer: data.first[0], head: data.first[1], edges: +(one("input[name=edges]:checked")?.value ?? 0) });
// Maps of tokens that do not fit begin at their end, where the answer stands; so does each that a switch brings up.
const atEnd = () => all("[data-cells]").forEach((table) => {
  const room = table.closest(".scroll");
  if (room?.clientWidth && !room.dataset.moved) Object.assign(room, { scrollLeft: room.scrollWidth }).dataset.moved = "yes";
});
document.addEventListener("change", atEnd);
atEnd();
// What goes on beyond an edge fades towards it.
const fade = (room) => {
  room.classList.toggle("right", room.scrollLeft + room.clientWidth < room.scrollWidth - 2);
  room.classList.toggle("below", room.scrollTop + room.clientHeight < room.scrollHeight - 2);
};
const fading = new ResizeObserver((entries) => entries.forEach(({ target }) => fade(target)));
for (const room of all(".scroll")) {
  room.addEventListener("scroll", () => fade(room), { passive: true });
  fading.observe(room);
}
