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
    const sign = down ? -1 : 1;
    const compare = (a, b) => sign * value(a).localeCompare(value(b), "en", { numeric: true });
    const place = (row) => (isNaN(value(row)) ? Infinity : sign * value(row));  // what is no number stands last
    const difference = (a, b) => place(a) - place(b) || 0;
    body.append(...[...body.rows].sort(numeric ? difference : compare));
  });
}

// A link to a line unfolds and opens it.
function open_line() {
  const line = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
  if (!line) return;
  for (let each = line; each; each = each.parentElement) if (each.tagName === "DETAILS") each.open = true;
  line.scrollIntoView({ block: line.tagName === "SECTION" ? "start" : "center" });
}
addEventListener("hashchange", open_line);
open_line();

// Charts that were folded away have no size until they are seen.
for (const each of document.querySelectorAll("details"))
  each.addEventListener("toggle", () => dispatchEvent(new Event("resize")));
