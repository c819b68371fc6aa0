// Tables that are wider than the page scroll: the keyboard has to reach them.
document$.subscribe(() => {
  for (const box of document.querySelectorAll(".md-typeset__scrollwrap")) {
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", "table");
  }
});
