//! The fixed newstyle handshake: from a fresh connection to an export that takes requests.
//!
//! ```text
//!   server's greeting -> flags -> [option STARTTLS -> ACK -> TLS] -> option STRUCTURED_REPLY -> option GO: INFO ...
//!     -> ACK -> requests
//! ```
//! TLS comes before anything else is asked for, and nothing that the server says before it is used.
//!
//! Everything that a server can make long has a bound here: the number of its answers, the length of each; the time is
//! bounded by the stream.

use crate::blocks::BLOCK;
use std::io::{self, Read, Write};

const GREETING: &[u8; 16] = b"NBDMAGICIHAVEOPT";
const OPTION_MAGIC: &[u8; 8] = b"IHAVEOPT";
const ANSWER_MAGIC: u64 = 0x0003_e889_0455_65a9;

/// Of the greeting: options are haggled over one at a time, and an unknown one is no end.
const FIXED_NEWSTYLE: u16 = 1;
/// Of the greeting: no 124 zeros at the end.
const NO_ZEROES: u16 = 2;

const OPTION_STARTTLS: u32 = 5;
const OPTION_GO: u32 = 7;
const OPTION_STRUCTURED_REPLY: u32 = 8;

const ANSWER_ACK: u32 = 1;
const ANSWER_INFO: u32 = 3;
/// Answers with this bit refuse.
const ANSWER_ERROR: u32 = 1 << 31;

const INFO_EXPORT: u16 = 0;
const INFO_BLOCK_SIZE: u16 = 3;

/// Maximum number of answers of a server, to all options.
const ANSWERS_MAX: u32 = 64;
/// Maximum number of bytes of an answer.
const ANSWER_LEN_MAX: u32 = 4096;
/// Maximum number of bytes of an export's name.
const NAME_LEN_MAX: usize = 4096;

/// Maximum number of bytes of a request where a server sets no bound.
const REQUEST_LEN_DEFAULT: u32 = 32 << 20;

/// Least bytes of the longest request: what a region and an encrypted store ask for at once.
const REQUEST_MAX_LEAST: u32 = 2 << 20;

/// Abilities of an export, as its server announces them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Export {
    size: u64,
    flags: u16,
    /// Bytes of which offsets and lengths must be multiples.
    block_min: u32,
    /// Maximum number of bytes of a request.
    request_max: u32,
    is_chunked: bool,
}

impl Export {
    const HAS_FLAGS: u16 = 1;
    const READ_ONLY: u16 = 1 << 1;
    const SEND_FLUSH: u16 = 1 << 2;
    const SEND_TRIM: u16 = 1 << 5;
    const MULTI_CONN: u16 = 1 << 8;

    /// The first thing that it lacks and that every use of it needs, for people.
    #[must_use]
    pub fn defect(&self) -> Option<String> {
        let (block, most) = (self.block_min, self.request_max);
        match () {
            () if self.is_read_only() => Some("is read-only".to_owned()),
            () if !self.has_multi_conn() => Some(
                "does not promise that what is written on one connection is read on the others \
                 (MULTI_CONN): `nbdkit --filter=multi-conn` and `qemu-nbd --shared=0` do"
                    .to_owned(),
            ),
            () if u64::from(block) > BLOCK || !block.is_power_of_two() => {
                Some(format!("has blocks of {block} bytes, not of {BLOCK} or less"))
            }
            () if most < REQUEST_MAX_LEAST => {
                Some(format!("takes requests of {most} bytes only, not of {REQUEST_MAX_LEAST}"))
            }
            () => None,
        }
    }

    fn has(&self, flag: u16) -> bool {
        self.flags & Export::HAS_FLAGS != 0 && self.flags & flag != 0
    }

    /// Bytes that it has.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Reads are answered in chunks.
    pub(crate) fn is_chunked(&self) -> bool {
        self.is_chunked
    }

    /// It refuses writes.
    #[must_use]
    pub fn is_read_only(&self) -> bool {
        self.has(Export::READ_ONLY)
    }

    /// Freed space can be given back.
    #[must_use]
    pub fn can_trim(&self) -> bool {
        self.has(Export::SEND_TRIM)
    }

    /// Flushes are understood: written bytes can be made to outlive the server's power.
    #[must_use]
    pub fn can_flush(&self) -> bool {
        self.has(Export::SEND_FLUSH)
    }

    /// Connections see each other's writes.
    #[must_use]
    pub fn has_multi_conn(&self) -> bool {
        self.has(Export::MULTI_CONN)
    }
}

/// A server's answer to an option.
struct Answer {
    kind: u32,
    data: Vec<u8>,
}

/// Haggles over the options and enters an export, without TLS.
///
/// # Errors
/// Those of the stream; [`io::ErrorKind::InvalidData`] for a server that is none, [`io::ErrorKind::Unsupported`] for one
/// that is too old, [`io::ErrorKind::PermissionDenied`] with its reason for one that refuses.
pub fn shake_hands(stream: &mut (impl Read + Write), name: &str) -> io::Result<Export> {
    greet(stream)?;
    Export::enter(stream, name)
}

/// Begins: after that the server takes options.
pub(crate) fn greet(stream: &mut (impl Read + Write)) -> io::Result<()> {
    let mut greeting = [0; 18];
    stream.read_exact(&mut greeting)?;
    if &greeting[..16] != GREETING {
        return Err(invalid("it is no NBD server, or one without options"));
    }
    let flags = u16::from_be_bytes([greeting[16], greeting[17]]);
    if flags & FIXED_NEWSTYLE == 0 {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "the server is too old"));
    }
    stream.write_all(&u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES)).to_be_bytes())
}

/// Asks for TLS, which begins with the next byte. One that refuses is not used without.
pub(crate) fn request_tls(stream: &mut (impl Read + Write)) -> io::Result<()> {
    let mut haggle = Haggle { stream, answers: 0 };
    haggle.ask(OPTION_STARTTLS, &[])?;
    match haggle.answer(OPTION_STARTTLS)?.kind {
        ANSWER_ACK => Ok(()),
        _ => {
            let what = "it offers no TLS: start it with that (`nbdkit --tls=require`), or write nbd:// where nobody \
                        else can listen";
            Err(io::Error::new(io::ErrorKind::PermissionDenied, what))
        }
    }
}

impl Export {
    /// Haggles over the options and enters an export.
    pub(crate) fn enter(stream: &mut (impl Read + Write), name: &str) -> io::Result<Export> {
        if name.len() > NAME_LEN_MAX {
            let what = "the export's name is too long";
            return Err(io::Error::new(io::ErrorKind::InvalidInput, what));
        }
        let mut haggle = Haggle { stream, answers: 0 };
        haggle.ask(OPTION_STRUCTURED_REPLY, &[])?;
        let is_chunked = haggle.answer(OPTION_STRUCTURED_REPLY)?.kind == ANSWER_ACK;
        haggle.go(name, is_chunked)
    }
}

struct Haggle<'a, S> {
    stream: &'a mut S,
    answers: u32,
}

impl<S: Read + Write> Haggle<'_, S> {
    fn ask(&mut self, option: u32, data: &[u8]) -> io::Result<()> {
        let len = (data.len() as u32).to_be_bytes();
        let request = [&OPTION_MAGIC[..], &option.to_be_bytes(), &len, data].concat();
        self.stream.write_all(&request)
    }

    fn answer(&mut self, option: u32) -> io::Result<Answer> {
        self.answers += 1;
        if self.answers > ANSWERS_MAX {
            return Err(invalid("the server answers without end"));
        }
        let mut head = [0; 20];
        self.stream.read_exact(&mut head)?;
        let number =
            |at: usize| u32::from_be_bytes([head[at], head[at + 1], head[at + 2], head[at + 3]]);
        let (magic, len) = (&head[..8], number(16));
        if *magic != ANSWER_MAGIC.to_be_bytes() || number(8) != option || len > ANSWER_LEN_MAX {
            return Err(invalid("the server's answer is none"));
        }
        let mut data = vec![0; len as usize];
        self.stream.read_exact(&mut data)?;
        Ok(Answer { kind: number(12), data })
    }

    fn go(&mut self, name: &str, is_chunked: bool) -> io::Result<Export> {
        let len = (name.len() as u32).to_be_bytes();
        let infos = [&1_u16.to_be_bytes()[..], &INFO_BLOCK_SIZE.to_be_bytes()].concat();
        self.ask(OPTION_GO, &[&len[..], name.as_bytes(), &infos].concat())?;
        let mut export = None;
        let (mut block_min, mut request_max) = (1, REQUEST_LEN_DEFAULT);
        loop {
            let Answer { kind, data } = self.answer(OPTION_GO)?;
            let info = data.first_chunk::<2>().map(|kind| u16::from_be_bytes(*kind));
            match (kind, info) {
                (ANSWER_ACK, _) => {
                    let (size, flags) = export.ok_or_else(|| invalid("the export has no size"))?;
                    return Ok(Export { size, flags, block_min, request_max, is_chunked });
                }
                (ANSWER_INFO, Some(INFO_EXPORT)) => {
                    let (size, flags) = (field(&data, 2)?, field(&data, 10)?);
                    export = Some((u64::from_be_bytes(size), u16::from_be_bytes(flags)));
                }
                (ANSWER_INFO, Some(INFO_BLOCK_SIZE)) => {
                    block_min = u32::from_be_bytes(field(&data, 2)?);
                    request_max = u32::from_be_bytes(field(&data, 10)?);
                }
                (ANSWER_INFO, Some(_)) => {}
                (kind, _) if kind & ANSWER_ERROR != 0 => return Err(refused(kind, &data)),
                _ => return Err(invalid("the server's answer is none")),
            }
        }
    }
}

fn field<const N: usize>(data: &[u8], at: usize) -> io::Result<[u8; N]> {
    let bytes = data.get(at..at + N).and_then(|bytes| bytes.try_into().ok());
    bytes.ok_or_else(|| invalid("the server's answer is too short"))
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

/// The error of a server that does not let this client in.
fn refused(kind: u32, explanation: &[u8]) -> io::Error {
    let why = match kind & !ANSWER_ERROR {
        1 => "it does not know how to enter an export (option GO)",
        2 => "its policy forbids it",
        5 => "it demands TLS: write nbds://HOST/EXPORT?tls-certificates=DIR",
        6 => "it has no such export",
        7 => "it is shutting down",
        8 => "it demands other block sizes",
        _ => "it refuses",
    };
    // For people: what it says itself, as far as that is harmless to print.
    let text = String::from_utf8_lossy(explanation);
    let text: String = text.chars().filter(|c| !c.is_control()).take(200).collect();
    let text = if text.is_empty() { text } else { format!(": {text}") };
    io::Error::new(io::ErrorKind::PermissionDenied, format!("{why}{text}"))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// A server that has said all it will say.
    struct Script {
        said: io::Cursor<Vec<u8>>,
        heard: Vec<u8>,
    }

    impl Read for Script {
        fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
            self.said.read(into)
        }
    }

    impl Write for Script {
        fn write(&mut self, from: &[u8]) -> io::Result<usize> {
            self.heard.extend(from);
            Ok(from.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn answer(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
        let head = [ANSWER_MAGIC.to_be_bytes(), [[0; 4]; 2].concat().try_into().expect("8")];
        let mut bytes = head[0].to_vec();
        bytes.extend(option.to_be_bytes());
        bytes.extend(kind.to_be_bytes());
        bytes.extend((data.len() as u32).to_be_bytes());
        bytes.extend(data);
        bytes
    }

    fn greeting() -> Vec<u8> {
        [&GREETING[..], &(FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes()].concat()
    }

    fn script(said: Vec<u8>) -> Script {
        Script { said: io::Cursor::new(said), heard: Vec::new() }
    }

    fn export_info(size: u64, flags: u16) -> Vec<u8> {
        [&INFO_EXPORT.to_be_bytes()[..], &size.to_be_bytes(), &flags.to_be_bytes()].concat()
    }

    #[test]
    fn an_export_is_entered_with_what_it_can() {
        let blocks = [1_u32, 4096, 1 << 25].map(u32::to_be_bytes).concat();
        let mut server = script(
            [
                greeting(),
                answer(OPTION_STRUCTURED_REPLY, ANSWER_ACK, &[]),
                answer(OPTION_GO, ANSWER_INFO, &export_info(1 << 30, 1 | 4 | 32)),
                answer(
                    OPTION_GO,
                    ANSWER_INFO,
                    &[&INFO_BLOCK_SIZE.to_be_bytes()[..], &blocks].concat(),
                ),
                answer(OPTION_GO, ANSWER_ACK, &[]),
            ]
            .concat(),
        );
        let export = shake_hands(&mut server, "cold").expect("entered");
        assert_eq!((export.size, export.block_min, export.request_max), (1 << 30, 1, 1 << 25));
        assert!(export.is_chunked && export.can_trim() && export.can_flush());
        assert!(!export.is_read_only() && !export.has_multi_conn());
        assert!(server.heard.windows(4).any(|bytes| bytes == b"cold"));
    }

    #[test]
    fn a_server_without_chunks_is_entered_all_the_same() {
        let mut server = script(
            [
                greeting(),
                answer(OPTION_STRUCTURED_REPLY, ANSWER_ERROR | 1, &[]),
                answer(OPTION_GO, ANSWER_INFO, &export_info(4096, 0)),
                answer(OPTION_GO, ANSWER_ACK, &[]),
            ]
            .concat(),
        );
        let export = shake_hands(&mut server, "").expect("entered");
        assert!(!export.is_chunked && !export.can_flush());
    }

    #[test]
    fn refusals_say_why() {
        let said = [
            greeting(),
            answer(OPTION_STRUCTURED_REPLY, ANSWER_ACK, &[]),
            answer(OPTION_GO, ANSWER_ERROR | 6, b"no\x1b such"),
        ];
        let error = shake_hands(&mut script(said.concat()), "x").expect_err("refused");
        assert_eq!(error.to_string(), "it has no such export: no such");
        for said in [&b"HTTP/1.1 400 Bad Request\r\n"[..], b"NBDMAGICIHAVEOPT\0\0"] {
            assert!(shake_hands(&mut script(said.to_vec()), "").is_err());
        }
    }

    #[test]
    fn endless_answers_end() {
        let mut said = [greeting(), answer(OPTION_STRUCTURED_REPLY, ANSWER_ACK, &[])].concat();
        for _ in 0..1000 {
            said.extend(answer(OPTION_GO, ANSWER_INFO, &[0, 9]));
        }
        let mut server = script(said);
        let error = shake_hands(&mut server, "").expect_err("without end");
        assert!(error.to_string().contains("without end"), "{error}");
        assert!(server.said.position() < 4096);
    }

    proptest! {
        #[test]
        fn any_bytes_of_a_server_end_the_handshake(
            bytes in prop::collection::vec(any::<u8>(), 0..300),
            begins_well: bool,
        ) {
            let said = if begins_well {
                let ack = answer(OPTION_STRUCTURED_REPLY, ANSWER_ACK, &[]);
                [greeting(), ack, answer(OPTION_GO, ANSWER_INFO, &bytes), bytes].concat()
            } else {
                bytes
            };
            prop_assert!(shake_hands(&mut script(said), "x").is_err());
        }
    }
}
