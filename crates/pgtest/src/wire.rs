//! PostgreSQL's wire protocol, as far as it takes to see where a message ends and which one is a COMMIT.
//!
//! A message is a tag of one byte and a length of four, which counts itself, and what it says. A client's first
//! messages have no tag: a wish for encryption, which the server answers with a single bare byte, and the start. A
//! cancellation is such a message too, and the only one of its connection.

use std::collections::HashSet;
use std::io;

/// The codes in the place of a protocol version that wish for encryption: by TLS, by GSSAPI.
const ENCRYPTION: [u32; 2] = [80_877_103, 80_877_104];
const CANCEL: u32 = 80_877_102;

/// One message, with its tag and length.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Message {
    pub bytes: Vec<u8>,
    pub kind: Kind,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// From a client: shall we encrypt? From a server: the bare byte that answers it.
    Encryption,
    /// The start of a session.
    Start,
    /// A cancellation of what another session does.
    Cancel,
    /// Everything else.
    Tagged(u8),
}

impl Message {
    /// What a tagged message says.
    pub fn body(&self) -> &[u8] {
        &self.bytes[5..]
    }
}

/// The bytes of one direction, put together to messages.
pub(crate) struct Stream {
    bytes: Vec<u8>,
    /// Whether messages have tags by now.
    tagged: bool,
}

impl Stream {
    pub fn of_client() -> Self {
        Self { bytes: Vec::new(), tagged: false }
    }

    pub fn of_server() -> Self {
        Self { bytes: Vec::new(), tagged: true }
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next message, once all of it is here.
    pub fn next(&mut self) -> io::Result<Option<Message>> {
        let start = usize::from(self.tagged);
        let Some(length) = number(&self.bytes, start) else { return Ok(None) };
        if length < 4 || (!self.tagged && length < 8) {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a message shorter than its length"));
        }
        let end = start + length as usize;
        if self.bytes.len() < end {
            return Ok(None);
        }
        let bytes: Vec<u8> = self.bytes.drain(..end).collect();
        let kind = match (self.tagged, number(&bytes, 4)) {
            (true, _) => Kind::Tagged(bytes[0]),
            (false, Some(code)) if ENCRYPTION.contains(&code) => Kind::Encryption,
            (false, Some(CANCEL)) => Kind::Cancel,
            (false, _) => Kind::Start,
        };
        self.tagged |= kind == Kind::Start;
        Ok(Some(Message { bytes, kind }))
    }

    /// The bare byte with which a server answers a wish for encryption, once it is here.
    pub fn next_bare(&mut self) -> Option<Message> {
        (!self.bytes.is_empty()).then(|| Message { bytes: self.bytes.drain(..1).collect(), kind: Kind::Encryption })
    }
}

fn number(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..at + 4).map(|four| u32::from_be_bytes(four.try_into().expect("four bytes are four")))
}

/// Knows the COMMITs among the messages of one client, also those that it prepared before.
#[derive(Default)]
pub(crate) struct Commits {
    /// The prepared statements that are a COMMIT, by name; the nameless one has the empty name.
    statements: HashSet<Vec<u8>>,
    /// The portals of such a statement.
    portals: HashSet<Vec<u8>>,
}

impl Commits {
    /// Whether this message makes the server commit.
    pub fn is_commit(&mut self, message: &Message) -> bool {
        let Kind::Tagged(tag) = message.kind else { return false };
        let mut body = message.body();
        match tag {
            b'Q' => return says_commit(text(&mut body)),
            b'E' => return self.portals.contains(text(&mut body)),
            b'P' => {
                let name = text(&mut body);
                remember(&mut self.statements, name, says_commit(text(&mut body)));
            }
            b'B' => {
                let portal = text(&mut body);
                remember(&mut self.portals, portal, self.statements.contains(text(&mut body)));
            }
            b'C' => {
                let names = if body.first() == Some(&b'S') { &mut self.statements } else { &mut self.portals };
                names.remove(text(&mut body.get(1..).unwrap_or_default()));
            }
            _ => {}
        }
        false
    }
}

/// Takes a text off the front, without the zero that ends it.
fn text<'a>(body: &mut &'a [u8]) -> &'a [u8] {
    let mut parts = body.splitn(2, |byte| *byte == 0);
    let text = parts.next().unwrap_or_default();
    *body = parts.next().unwrap_or_default();
    text
}

fn says_commit(statement: &[u8]) -> bool {
    let statement = statement.trim_ascii();
    statement.strip_suffix(b";").unwrap_or(statement).trim_ascii().eq_ignore_ascii_case(b"commit")
}

fn remember(names: &mut HashSet<Vec<u8>>, name: &[u8], is_commit: bool) {
    if is_commit {
        names.insert(name.to_vec());
    } else {
        names.remove(name);
    }
}

/// Whether this message of a server answers a COMMIT: it is done, or rolled back, or it failed.
pub(crate) fn answers_commit(message: &Message) -> bool {
    match message.kind {
        Kind::Tagged(b'C') => matches!(text(&mut message.body()), b"COMMIT" | b"ROLLBACK"),
        Kind::Tagged(b'E') => true,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A message in a line: its tag, and its texts parted by `,`; `-` is an empty one.
    fn bytes(line: &str) -> Vec<u8> {
        let (tag, texts) = line.split_once(' ').unwrap_or((line, ""));
        let mut body = Vec::new();
        for text in texts.split(',').filter(|text| !text.is_empty()) {
            body.extend_from_slice(text.strip_prefix('-').unwrap_or(text).as_bytes());
            body.push(0);
        }
        let mut bytes = tag.as_bytes().to_vec();
        bytes.extend_from_slice(&(body.len() as u32 + 4).to_be_bytes());
        bytes.extend_from_slice(&body);
        bytes
    }

    fn opening(code: u32) -> Vec<u8> {
        [8u32.to_be_bytes(), code.to_be_bytes()].concat()
    }

    /// Tells which lines commit; the marks in the text say which ones should.
    fn check(lines: &str) {
        let lines: Vec<&str> = lines.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
        let plain = |line: &str| line.trim_end_matches("<- commits").trim_end().to_owned();
        let mut whole: Vec<u8> = [opening(ENCRYPTION[0]), opening(196_608)].concat();
        whole.extend(lines.iter().flat_map(|line| bytes(&plain(line))));
        // However the network cuts it.
        for size in [1, 3, 7, whole.len()] {
            let (mut stream, mut commits, mut seen) = (Stream::of_client(), Commits::default(), Vec::new());
            for piece in whole.chunks(size) {
                stream.push(piece);
                while let Some(message) = stream.next().unwrap() {
                    seen.push((message.kind, commits.is_commit(&message)));
                }
            }
            assert_eq!(seen[..2], [(Kind::Encryption, false), (Kind::Start, false)]);
            let told: Vec<String> = lines
                .iter()
                .zip(&seen[2..])
                .map(|(line, (_, commits))| format!("{}{}", plain(line), if *commits { " <- commits" } else { "" }))
                .collect();
            let wanted: Vec<String> =
                lines.iter().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
            assert_eq!(told, wanted, "in pieces of {size}");
        }
    }

    #[test]
    fn a_commit_is_seen_as_a_query_and_as_a_prepared_statement() {
        check(
            "Q begin
             Q commit                <- commits
             Q Commit;               <- commits
             Q commit prepared
             Q select 'commit'

             P -,COMMIT
             B -,-
             E -                     <- commits
             S
             P -,select
             E -                     <- commits
             B -,-
             E -

             P done,commit
             P other,rollback
             B one,done
             B two,other
             E two
             E one                   <- commits
             C Sdone
             B one,done
             E one",
        );
    }

    #[test]
    fn a_server_answers_a_wish_for_encryption_with_a_bare_byte() {
        let mut stream = Stream::of_server();
        assert_eq!(stream.next_bare(), None);
        stream.push(b"N");
        stream.push(&bytes("C COMMIT"));
        assert_eq!(stream.next_bare().unwrap().bytes, b"N");
        assert!(answers_commit(&stream.next().unwrap().unwrap()));
    }

    #[test]
    fn a_length_that_cannot_be_is_refused() {
        let mut stream = Stream::of_server();
        stream.push(b"Z\0\0\0\x01");
        assert!(stream.next().is_err());
    }
}
