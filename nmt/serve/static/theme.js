// Light or dark: the system's choice, until one chooses oneself.

import { isDark } from "./colours.js";

const KEY = "nmt-theme";

// `changed()` hears of every change, because pictures have colours of their own.
export function startTheme(button, changed) {
  const root = document.documentElement;
  const stored = localStorage.getItem(KEY);
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;
  const named = () => (button.textContent = isDark() ? "Light" : "Dark");
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    localStorage.setItem(KEY, root.dataset.theme);
    named();
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    named();
    changed();
  });
  named();
}
