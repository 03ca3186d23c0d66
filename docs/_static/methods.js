// The table of all methods: show the rows that have what is chosen.
document.addEventListener("DOMContentLoaded", () => {
  const choices = [...document.querySelectorAll(".method-filters select")];
  const rows = [...document.querySelectorAll(".method-table tbody tr")];
  const count = document.querySelector(".method-count");
  const show = () => {
    for (const row of rows) row.hidden = choices.some((c) => c.value && row.dataset[c.dataset.key] !== c.value);
    if (count) count.textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} methods`;
  };
  for (const choice of choices) choice.addEventListener("change", show);
  show();
});
