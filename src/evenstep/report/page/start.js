drawCharts();
startPlans();
startRollouts();

const windowTable = document.getElementById("window-table");
windowTable.addEventListener("toggle", () => {
  if (windowTable.open) fillWindowTable(windowTable.querySelector(".wide"));
});

let widthBefore = document.documentElement.clientWidth;
let waiting = 0;
window.addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    if (document.documentElement.clientWidth === widthBefore) return;
    widthBefore = document.documentElement.clientWidth;
    for (const draw of redraws) draw();
  }, 100);
});
