(() => {
  // Paper is white, and shows what is folded away on a screen.
  let folded = [];
  addEventListener("beforeprint", () => {
    document.documentElement.classList.add("printing");
    folded = [...document.querySelectorAll("details:not([open])")];
    folded.forEach((details) => { details.open = true; });
  });
  addEventListener("afterprint", () => {
    document.documentElement.classList.remove("printing");
    folded.forEach((details) => { details.open = false; });
  });
})();
