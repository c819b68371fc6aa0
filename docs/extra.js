// What is wider than the page scrolls: the keyboard has to reach it.
document$.subscribe(() => {
  const boxes = [
    ...[...document.querySelectorAll(".md-typeset__scrollwrap")].map((box) => [box, "table"]),
    ...[...document.querySelectorAll('.md-typeset p > img[src$=".svg"]')].map((img) => [img.parentElement, "picture"]),
  ];
  for (const [box, name] of boxes) {
    box.tabIndex = 0;
    box.setAttribute("role", "group");
    box.setAttribute("aria-label", name);
  }
});
