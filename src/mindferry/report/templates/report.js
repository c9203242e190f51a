(function () {
  "use strict";
  var root = document.documentElement;
  function press(group, chosen) {
    document.querySelectorAll("[data-" + group + "]").forEach(function (button) {
      button.setAttribute("aria-pressed", String(button.getAttribute("data-" + group) === chosen));
    });
  }
  document.querySelectorAll("[data-language]").forEach(function (button) {
    button.addEventListener("click", function () {
      root.lang = button.getAttribute("data-language");
      press("language", root.lang);
    });
  });
  document.querySelectorAll("[data-theme]").forEach(function (button) {
    button.addEventListener("click", function () {
      root.setAttribute("class", button.getAttribute("data-theme"));
      press("theme", button.getAttribute("data-theme"));
    });
  });
  // Paper has nothing to click: what is folded away is printed, too.
  var folded = [];
  window.addEventListener("beforeprint", function () {
    folded = Array.prototype.slice.call(document.querySelectorAll("details:not([open])"));
    folded.forEach(function (item) { item.open = true; });
  });
  window.addEventListener("afterprint", function () {
    folded.forEach(function (item) { item.open = false; });
  });
})();
