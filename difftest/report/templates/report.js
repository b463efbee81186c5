"use strict";
const columns = ["case", "metric", "value", "bound", "worst element or reason"];
const details = JSON.parse(document.getElementById("details").textContent);
function element(name, text) {
  const made = document.createElement(name);
  if (text !== undefined) made.textContent = text;
  return made;
}
function show(button) {
  const table = button.closest("table");
  const panel = table.closest("details").querySelector(".panel");
  for (const other of table.querySelectorAll("button[aria-expanded]")) other.removeAttribute("aria-expanded");
  button.setAttribute("aria-expanded", "true");
  const rows = details[table.dataset.path][button.dataset.key];
  const [layer, stage] = button.dataset.key.split("/");
  const made = element("table");
  made.className = "plain";
  const head = made.createTHead().insertRow();
  for (const column of columns) {
    const cell = element("th", column);
    cell.scope = "col";
    head.append(cell);
  }
  const body = made.createTBody();
  for (const row of rows) {
    const line = body.insertRow();
    for (const value of row) line.append(element("td", value));
  }
  const scroll = element("div");
  scroll.className = "scroll";
  scroll.append(made);
  panel.replaceChildren(element("p", `Layer ${layer}, ${stage}: ${button.getAttribute("aria-label").split(": ")[1]}`), scroll);
}
function move(button, down, right) {
  const cell = button.closest("td");
  const row = cell.parentElement.parentElement.rows[cell.parentElement.sectionRowIndex + down];
  const next = row && row.cells[cell.cellIndex + right];
  const target = next && next.querySelector("button");
  if (target) target.focus();
}
const arrows = { ArrowDown: [1, 0], ArrowUp: [-1, 0], ArrowRight: [0, 1], ArrowLeft: [0, -1] };
for (const table of document.querySelectorAll("table.heat")) {
  table.addEventListener("click", (event) => {
    const button = event.target.closest("button");
    if (button) show(button);
  });
  table.addEventListener("keydown", (event) => {
    const button = event.target.closest("button");
    if (button && arrows[event.key]) {
      event.preventDefault();
      move(button, ...arrows[event.key]);
    }
  });
}
