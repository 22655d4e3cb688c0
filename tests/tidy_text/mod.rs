//! Sources as text: comments and literals blanked out, functions measured.

mod book;
pub(crate) mod fields;
pub(crate) mod imports;
pub(crate) mod methods;
pub(crate) mod types;

/// A source file.
pub(crate) struct Source {
    /// Path below the workspace's root.
    pub(crate) name: String,
    /// The file as it is.
    pub(crate) text: String,
    /// The file with every byte of comments, strings and characters replaced by a blank; line
    /// ends stay, so that offsets and lines agree with `text`.
    pub(crate) code: String,
}

/// A function with a body.
pub(crate) struct Function<'a> {
    pub(crate) name: &'a str,
    /// Line of its `fn`, from 1.
    pub(crate) line: usize,
    /// Lines from its `fn` to its closing brace.
    pub(crate) lines: usize,
}

/// Whether a character belongs to an identifier.
pub(crate) fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// The identifiers and numbers of a text.
pub(crate) fn words(text: &str) -> impl Iterator<Item = &str> + Clone {
    text.split(|c| !is_word(c)).filter(|word| !word.is_empty())
}

impl Source {
    pub(crate) fn new(name: &str, text: String) -> Source {
        Source { name: name.to_owned(), code: blank(&text), text }
    }

    /// The line, from 1, of an offset.
    pub(crate) fn line_of(&self, offset: usize) -> usize {
        self.text.as_bytes()[..offset].iter().filter(|byte| **byte == b'\n').count() + 1
    }

    /// Whether an identifier or keyword occurs in the code.
    pub(crate) fn has_word(&self, wanted: &str) -> bool {
        words(&self.code).any(|word| word == wanted)
    }

    /// Every function with a body, nested ones too.
    pub(crate) fn functions(&self) -> Vec<Function<'_>> {
        let mut found = Vec::new();
        for (at, _) in self.code.match_indices("fn ") {
            if self.code[..at].ends_with(is_word) {
                continue;
            }
            let Some(name) = words(&self.code[at + 3..]).next() else { continue };
            let Some(end) = end_of_body(&self.code[at..]) else { continue };
            let line = self.line_of(at);
            found.push(Function { name, line, lines: self.line_of(at + end) - line + 1 });
        }
        found
    }
}

/// The offset of the brace that closes a function's body; `None` for one without.
fn end_of_body(code: &str) -> Option<usize> {
    let mut parens = 0;
    let mut braces = 0;
    for (index, byte) in code.bytes().enumerate() {
        match byte {
            b'(' | b'[' => parens += 1,
            b')' | b']' => parens -= 1,
            // A declaration; array types have their semicolon in brackets.
            b';' if parens == 0 && braces == 0 => return None,
            b'{' => braces += 1,
            b'}' => {
                braces -= 1;
                if braces == 0 {
                    return Some(index);
                }
                if braces < 0 {
                    return None;
                }
            }
            _ => {}
        }
    }
    None
}

/// Replaces comments and literals by blanks.
fn blank(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut code = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let len = literal_len(&text[at..], text[..at].ends_with(is_word));
        for byte in code[at..at + len].iter_mut().filter(|byte| **byte != b'\n') {
            *byte = b' ';
        }
        at += if len > 0 { len } else { text[at..].chars().next().map_or(1, char::len_utf8) };
    }
    String::from_utf8(code).expect("whole characters were replaced")
}

/// The length of the comment or literal that `text` begins with; 0 if it begins with code.
fn literal_len(text: &str, after_word: bool) -> usize {
    if text.starts_with("//") {
        return text.find('\n').unwrap_or(text.len());
    }
    if text.starts_with("/*") {
        return block_comment_len(text);
    }
    if text.starts_with('"') {
        return quoted_len(text, '"');
    }
    if text.starts_with('\'') {
        return char_len(text);
    }
    let raw = text.strip_prefix("br").or_else(|| text.strip_prefix('r'));
    match raw.filter(|_| !after_word) {
        Some(rest) => raw_len(rest).map_or(0, |len| text.len() - rest.len() + len),
        None => 0,
    }
}

fn block_comment_len(text: &str) -> usize {
    let mut depth = 0;
    let mut at = 0;
    while at < text.len() {
        if text.as_bytes()[at..].starts_with(b"/*") {
            (depth, at) = (depth + 1, at + 2);
        } else if text.as_bytes()[at..].starts_with(b"*/") {
            (depth, at) = (depth - 1, at + 2);
            if depth == 0 {
                return at;
            }
        } else {
            at += 1;
        }
    }
    text.len()
}

/// The length of a literal that ends with an unescaped quote.
fn quoted_len(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (index, c) in text.char_indices().skip(1) {
        match c {
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            c if c == quote => return index + 1,
            _ => {}
        }
    }
    text.len()
}

/// The length of a character literal; 0 for a lifetime.
fn char_len(text: &str) -> usize {
    let mut chars = text.chars().skip(1);
    match (chars.next(), chars.next()) {
        (Some('\\'), _) => quoted_len(text, '\''),
        (Some(c), Some('\'')) => c.len_utf8() + 2,
        _ => 0,
    }
}

/// The length of a raw string without its `r`; `None` if it is none.
fn raw_len(text: &str) -> Option<usize> {
    let hashes = text.bytes().take_while(|byte| *byte == b'#').count();
    let inside = text[hashes..].strip_prefix('"')?;
    let end = format!("\"{}", "#".repeat(hashes));
    Some(hashes + 1 + inside.find(&end)? + end.len())
}
