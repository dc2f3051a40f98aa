"use strict";
// The tip is one box of text next to the pointer. The tables have the same figures.
const tipBox = document.createElement("div");
tipBox.className = "tip";
tipBox.hidden = true;
tipBox.setAttribute("role", "status");
document.body.append(tipBox);

function tip(at, text) {
  tipBox.textContent = text;
  tipBox.hidden = false;
  const box = tipBox.getBoundingClientRect(), gap = 14;
  const x = at.clientX + gap + box.width > innerWidth ? at.clientX - gap - box.width : at.clientX + gap;
  const y = at.clientY + gap + box.height > innerHeight ? at.clientY - gap - box.height : at.clientY + gap;
  tipBox.style.left = Math.max(4, Math.min(x, innerWidth - box.width - 4)) + "px";
  tipBox.style.top = Math.max(4, y) + "px";
}

function untip() { tipBox.hidden = true; }

for (const e of document.querySelectorAll("[data-tip]")) {
  // Otherwise the browser would show its own tip too.
  e.querySelector("title")?.remove();
  e.addEventListener("pointerenter", at => tip(at, e.dataset.tip));
  e.addEventListener("pointerdown", at => tip(at, e.dataset.tip));
  e.addEventListener("pointerleave", untip);
}
addEventListener("scroll", untip, {passive: true});

// Zoom changes the viewBox of a drawing.
for (const figure of document.querySelectorAll("figure.zoom")) {
  const svg = figure.querySelector("svg");
  const whole = svg.viewBox.baseVal, all = {x: whole.x, y: whole.y, w: whole.width, h: whole.height};
  let view = {...all};
  const show = v => {
    const w = Math.min(all.w, Math.max(all.w / 40, v.w)), h = w * all.h / all.w;
    view = {w, h, x: Math.min(Math.max(v.x, all.x), all.x + all.w - w), y: Math.min(Math.max(v.y, all.y), all.y + all.h - h)};
    svg.setAttribute("viewBox", [view.x, view.y, view.w, view.h].join(" "));
    svg.classList.toggle("moved", view.w < all.w);
    untip();
  };
  // zoom keeps the point (fx, fy), in fractions of the visible part, in its place.
  const zoom = (by, fx = .5, fy = .5) => {
    const w = Math.min(all.w, Math.max(all.w / 40, view.w / by));
    show({w, x: view.x + fx * (view.w - w), y: view.y + fy * (view.h - w * all.h / all.w)});
  };
  const part = at => {
    const box = svg.getBoundingClientRect();
    return [(at.clientX - box.left) / box.width, (at.clientY - box.top) / box.height];
  };
  const tools = document.createElement("div");
  tools.className = "tools";
  const buttons = [
    ["+", "zoom in", "or Ctrl and the wheel, or a double click; then drag", () => zoom(1.5)],
    ["\u2212", "zoom out", "or Ctrl and the wheel", () => zoom(1 / 1.5)],
    ["1:1", "whole drawing", "", () => show(all)],
  ];
  for (const [text, name, how, act] of buttons) {
    const b = document.createElement("button");
    b.type = "button";
    b.textContent = text;
    b.title = how === "" ? name : `${name} (${how})`;
    b.setAttribute("aria-label", name);
    b.addEventListener("click", act);
    tools.append(b);
  }
  figure.prepend(tools);
  svg.addEventListener("dblclick", at => zoom(2, ...part(at)));
  svg.addEventListener("wheel", at => {
    if (!at.ctrlKey && !at.metaKey) return; // the wheel alone scrolls the page
    at.preventDefault();
    zoom(at.deltaY < 0 ? 1.25 : 1 / 1.25, ...part(at));
  }, {passive: false});
  let from = null;
  svg.addEventListener("pointerdown", at => {
    if (view.w < all.w) from = {id: at.pointerId, x: at.clientX, y: at.clientY, view};
  });
  svg.addEventListener("pointermove", at => {
    if (from === null || from.id !== at.pointerId) return;
    const box = svg.getBoundingClientRect();
    const dx = (at.clientX - from.x) / box.width, dy = (at.clientY - from.y) / box.height;
    if (Math.hypot(at.clientX - from.x, at.clientY - from.y) < 4) return; // a click with a slight movement
    svg.setPointerCapture(at.pointerId);
    show({w: from.view.w, x: from.view.x - dx * from.view.w, y: from.view.y - dy * from.view.h});
  });
  for (const end of ["pointerup", "pointercancel"]) svg.addEventListener(end, () => { from = null; });
}

// A click on a header sorts by its column: words ascending, numbers descending, the other
// way at the next click. Rows without a number stay at the end.
for (const table of document.querySelectorAll("table.sort")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const words = head.classList.contains("text");
      const before = head.getAttribute("aria-sort");
      const up = before === null ? words : before === "descending";
      for (const h of heads) h.removeAttribute("aria-sort");
      head.setAttribute("aria-sort", up ? "ascending" : "descending");
      const key = row => {
        const cell = row.cells[column];
        const text = cell === undefined ? "" : cell.dataset.v ?? cell.textContent;
        return words ? text : text === "" || isNaN(text) ? null : Number(text);
      };
      const body = table.tBodies[0];
      const rows = [...body.rows].map(row => [key(row), row]);
      rows.sort(([a], [b]) => {
        if (a === null || b === null) return (a === null) - (b === null);
        const order = words ? a.localeCompare(b) : a - b;
        return up ? order : -order;
      });
      body.append(...rows.map(([, row]) => row));
    });
  });
}
