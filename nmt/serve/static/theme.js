// The light or dark theme: the system's, until the user chooses one.

import { isDark } from "./colours.js";
import { storage } from "./storage.js";

const KEY = "nmt-theme";
const KEPT = storage("localStorage");

// Applies the theme chosen earlier, and lets `button` switch it. Calls `changed()` after every change, because the pictures do
// not take their colours from the style sheet.
export function startTheme(button, changed) {
  const root = document.documentElement;
  const stored = KEPT.get(KEY);
  if (stored === "light" || stored === "dark") root.dataset.theme = stored;
  const named = () => (button.textContent = isDark() ? "Light" : "Dark");
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    KEPT.set(KEY, root.dataset.theme);
    named();
    changed();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    named();
    changed();
  });
  named();
}
