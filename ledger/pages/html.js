"use strict";
// Sorts a table by the column whose heading is clicked: largest number or first word first, then the other way round.
for (const heading of document.querySelectorAll("th")) {
  const button = document.createElement("button");
  button.append(...heading.childNodes);
  heading.append(button);
  button.addEventListener("click", () => {
    const table = heading.closest("table"), body = table.tBodies[0], column = heading.cellIndex;
    const numeric = heading.classList.contains("n");
    const before = heading.getAttribute("aria-sort");
    const down = before ? before === "ascending" : numeric;
    for (const each of table.querySelectorAll("th")) each.removeAttribute("aria-sort");
    heading.setAttribute("aria-sort", down ? "descending" : "ascending");
    const value = (row) => row.cells[column].dataset.v ?? row.cells[column].textContent;
    const compare = (a, b) => value(a).localeCompare(value(b), "en", { numeric: true });
    const difference = (a, b) => Number(value(a)) - Number(value(b));
    const rows = [...body.rows].sort(numeric ? difference : compare);
    body.append(...(down ? rows.reverse() : rows));
  });
}

// A link to a line unfolds and opens it.
function open_line() {
  const line = location.hash && document.getElementById(location.hash.slice(1));
  if (!line) return;
  for (let each = line; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
  line.scrollIntoView({ block: line.tagName === "SECTION" ? "start" : "center" });
}
addEventListener("hashchange", open_line);
open_line();

// While the pointer rests on a line, its rows are shown beside it.
const shown = document.createElement("div");
shown.className = "card-hover";
shown.hidden = true;
shown.setAttribute("aria-hidden", "true");
document.body.append(shown);
let timer = 0;
if (matchMedia("(hover: hover) and (min-width: 761px)").matches) {
  for (const summary of document.querySelectorAll("details.line > summary")) {
    summary.addEventListener("pointerenter", () => {
      timer = setTimeout(() => {
        if (summary.parentElement.open) return;
        shown.replaceChildren(...summary.nextElementSibling.cloneNode(true).childNodes);
        shown.hidden = false;
        const line = summary.getBoundingClientRect(), below = line.bottom + 6;
        const fits = below + shown.offsetHeight < innerHeight;
        shown.style.top = `${fits ? below : Math.max(4, line.top - 6 - shown.offsetHeight)}px`;
        shown.style.left = `${Math.max(4, Math.min(line.left + 60, innerWidth - shown.offsetWidth - 12))}px`;
      }, 350);
    });
    for (const event of ["pointerleave", "click"])
      summary.addEventListener(event, () => { clearTimeout(timer); shown.hidden = true; });
  }
  addEventListener("scroll", () => { clearTimeout(timer); shown.hidden = true; }, { passive: true });
}

// The data as a file.
const link = document.createElement("a");
link.textContent = "Save the data (ledger.json)";
link.download = "ledger.json";
link.href = URL.createObjectURL(new Blob([document.getElementById("data").textContent], { type: "application/json" }));
document.querySelector("nav").append(" ", link);
