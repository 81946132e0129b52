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
