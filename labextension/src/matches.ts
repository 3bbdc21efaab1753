// Where a text stands in an element, whatever elements divide it.

export type Found = Range[];

/** The places of a text, without regard to its case. */
export function matches(element: Node, wanted: string): Found {
  const [found, nodes, starts]: [Found, Text[], number[]] = [[], [], []];
  let text = '';
  const walker = document.createTreeWalker(element, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode as Text;
    nodes.push(node);
    starts.push(text.length);
    text += node.data;
  }
  text = text.toLowerCase();
  const word = wanted.toLowerCase();
  let at = 0;
  const place = (offset: number): [Text, number] => {
    while (at + 1 < nodes.length && (starts[at + 1] ?? 0) <= offset) {
      at += 1;
    }
    return [nodes[at] as Text, offset - (starts[at] ?? 0)];
  };
  for (let from = text.indexOf(word); word && from >= 0; from = text.indexOf(word, from + word.length)) {
    const range = document.createRange();
    range.setStart(...place(from));
    range.setEnd(...place(from + word.length));
    found.push(range);
  }
  return found;
}
