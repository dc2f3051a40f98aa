
// The number under the pointer, from the values that the page carries.
{
  const data = JSON.parse(document.getElementById("weights").textContent);
  const bytes = Uint8Array.from(atob(data.values), c => c.charCodeAt(0));
  const values = new DataView(bytes.buffer);
  const svg = document.querySelector("figure.heat svg");
  const cell = at => {
    const p = new DOMPoint(at.clientX, at.clientY).matrixTransform(svg.getScreenCTM().inverse());
    for (let panel = 0; panel < data.data.length; panel++) {
      const [x, y, w, h] = data.data[panel];
      const i = Math.floor((p.y - y) / h * data.rows), j = Math.floor((p.x - x) / w * data.cols);
      if (i >= 0 && i < data.rows && j >= 0 && j < data.cols) return {panel, i, j};
    }
    return null;
  };
  const show = at => {
    const c = cell(at);
    if (c === null) return untip();
    const value = values.getFloat32(4 * ((c.panel * data.rows + c.i) * data.cols + c.j), true);
    const head = data.names[c.panel] === "" ? "" : data.names[c.panel] + "\n";
    tip(at, `${head}query ${data.query[c.i]}\nkey ${data.key[c.j]}\nweight ${Number(value.toPrecision(6))}`);
  };
  svg.addEventListener("pointermove", show);
  svg.addEventListener("pointerdown", show);
  svg.addEventListener("pointerleave", untip);
}
