redraw();
select({ layer: data.first[0], head: data.first[1], edges: +(one("input[name=edges]:checked")?.value ?? 0) });
