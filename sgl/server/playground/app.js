// The page: tabs, the key, and which model answers.

const tabs = {
  all: [...document.querySelectorAll("[role=tab]")],

  choose(tab, { focus = true } = {}) {
    for (const each of this.all) {
      const isChosen = each === tab;
      each.setAttribute("aria-selected", String(isChosen));
      each.tabIndex = isChosen ? 0 : -1;
      byId(each.getAttribute("aria-controls")).hidden = !isChosen;
    }
    if (focus) {
      tab.focus();
    }
    const name = tab.getAttribute("aria-controls");
    history.replaceState(null, "", `#${name}`);
    metrics.watch(name === "metrics");
  },

  move(event) {
    const steps = { ArrowRight: 1, ArrowLeft: -1 };
    const last = this.all.length - 1;
    const at = this.all.indexOf(event.target);
    const to = { Home: 0, End: last }[event.key] ?? (steps[event.key] ? (at + steps[event.key] + last + 1) % (last + 1) : -1);
    if (to >= 0) {
      event.preventDefault();
      this.choose(this.all[to]);
    }
  },

  begin() {
    for (const tab of this.all) {
      tab.addEventListener("click", () => this.choose(tab));
      tab.addEventListener("keydown", (event) => this.move(event));
    }
    const asked = this.all.find((tab) => `#${tab.getAttribute("aria-controls")}` === location.hash);
    if (asked) {
      this.choose(asked, { focus: false });
    }
  },
};

async function showModel() {
  const place = byId("model");
  try {
    const response = await ask("/v1/models");
    place.textContent = (await response.json()).data[0].id;
    place.classList.remove("error");
  } catch (error) {
    place.textContent = error.message;
    place.classList.add("error");
  }
}

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keyStore.write(byId("key").value.trim());
  showModel();
});
[chat, program, schemaTab, metrics, tabs].forEach((part) => part.begin());
showModel();
