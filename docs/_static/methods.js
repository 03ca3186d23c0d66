// The table of all methods: the first ones, all after a click, or those that have what is chosen.
document.addEventListener("DOMContentLoaded", () => {
  const choices = [...document.querySelectorAll(".method-filters select")];
  const rows = [...document.querySelectorAll(".method-table tr[data-tasks]")];
  const count = document.querySelector(".method-count");
  const all = document.querySelector(".method-all");
  if (!all) return;
  const show = () => {
    const open = all.hidden || choices.some((c) => c.value);
    for (const row of rows) {
      const fits = choices.every((c) => !c.value || row.dataset[c.dataset.key] === c.value);
      row.hidden = !fits || !(open || "first" in row.dataset);
    }
    for (const group of document.querySelectorAll(".method-group"))
      group.hidden = ![...group.parentElement.querySelectorAll("tr[data-tasks]")].some((row) => !row.hidden);
    count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} methods`;
  };
  for (const choice of choices) choice.addEventListener("change", show);
  all.addEventListener("click", () => {
    all.hidden = true;
    show();
  });
  all.hidden = false; // without this program all are shown, and there is no button
  show();
});
