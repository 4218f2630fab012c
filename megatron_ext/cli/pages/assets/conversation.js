"use strict";
const pieces = JSON.parse(document.getElementById("pieces").textContent);
const tip = document.getElementById("tip");
const cellsOfTurn = new WeakMap();
const tokensOfArticle = new WeakMap();

/** The cells of a turn, each with the first and the last token that reach into it. */
function cellsOf(turn) {
  if (!cellsOfTurn.has(turn)) {
    let next = Number(turn.dataset.first);
    cellsOfTurn.set(turn, [...turn.querySelectorAll(".text i, .text kbd")].map((element) => {
      const first = element.classList.contains("c") ? next - 1 : next;
      next += Number(element.dataset.n ?? 1);
      return { element, first, last: next - 1 };
    }));
  }
  return cellsOfTurn.get(turn);
}

/** Ids of a conversation, and where each token ends in its bytes. */
function tokensOf(article) {
  if (!tokensOfArticle.has(article)) {
    const { ids, lengths } = JSON.parse(article.querySelector("script").textContent);
    let end = 0;
    tokensOfArticle.set(article, { ids, ends: lengths.map((length) => (end += length)) });
  }
  return tokensOfArticle.get(article);
}

function row(...texts) {
  const line = document.createElement("tr");
  for (const [name, text] of texts) line.append(Object.assign(document.createElement(name), { textContent: text }));
  return line;
}

function show(element) {
  for (const old of document.querySelectorAll(".on")) old.classList.remove("on");
  tip.hidden = element === null;
  if (element === null) return;
  const cells = cellsOf(element.closest(".turn"));
  const at = cells.find((cell) => cell.element === element);
  const { ids, ends } = tokensOf(element.closest("article"));
  for (const cell of cells) {
    if (cell.first <= at.last && at.first <= cell.last) cell.element.classList.add("on");
  }
  const run = element.closest("bdi");
  const trained = run.classList.contains("t") ? "trained" : "not trained";
  const table = document.createElement("table");
  for (let token = at.first; token <= at.last; token += 1) {
    table.append(row(["th", "token"], ["td", token], ["th", "id"], ["td", ids[token]], ["th", "bytes"], ["td", `${ends[token - 1] ?? 0}–${ends[token]}`]));
  }
  const code = document.createElement("code");
  code.textContent = [...new Set(ids.slice(at.first, at.last + 1))].map((id) => pieces[id]).join("  ");
  tip.replaceChildren(code, table, `${run.dataset.from ?? "template"} · ${trained}`);
  const box = element.getClientRects()[0];
  const left = Math.min(box.left, document.documentElement.clientWidth - tip.offsetWidth - 16);
  tip.style.left = `${Math.max(left, 8) + window.scrollX}px`;
  tip.style.top = `${box.bottom + 8 + window.scrollY}px`;
}

for (const name of ["mouseover", "click"]) {
  document.addEventListener(name, (event) => show(event.target.closest(".text i, .text kbd")));
}
document.querySelector("nav").addEventListener("change", ({ target }) => {
  document.body.classList.toggle(target.name, target.checked);
});
