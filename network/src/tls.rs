//! TLS 1.3: rustls shakes hands on the thread that makes a connection; the records after that are made and opened here.
//!
//! ```text
//!   STARTTLS --shake_hands (rustls)--> TlsKeys --seal_record, open_record--> bytes in buffers of the connection's owner
//!                                         '--key update, of either side--> the next keys
//! ```
//! rustls allocates for every record, which the owner of a connection must not: it resolves faults, maybe in a signal
//! handler. So a handshake gives its two secrets away, from which keys are derived as RFC 8446 has it; ring seals and opens
//! in place.
//!
//! # Invariants
//! 1. No two records of a direction have the same nonce: each has the next number, and a key has [`RECORDS_MAX`] at most.
//! 2. Nothing of a record is used before its tag was found right.

use ring::aead::{self, Aad, LessSafeKey, Nonce, UnboundKey};
use ring::hkdf::{self, KeyType, Prk};
use rustls::client::Resumption;
use rustls::pki_types::pem::{self, PemObject};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use rustls::{
    AlertDescription, CertificateError, CipherSuite, ClientConfig, ClientConnection, KeyLog,
    RootCertStore,
};
use std::fmt;
use std::io::{self, Read, Write};
use std::path::Path;
use std::sync::{Arc, Mutex, PoisonError};
use zeroize::Zeroizing;

/// Maximum number of bytes that a record carries.
pub(crate) const PLAIN_MAX: usize = 1 << 14;
/// Bytes before those: kind, version, length.
const HEAD_LEN: usize = 5;
/// Bytes behind those: the kind, and the tag.
const TAIL_LEN: usize = 1 + 16;
/// Maximum number of bytes of a record that is made here.
pub(crate) const RECORD_MAX: usize = HEAD_LEN + PLAIN_MAX + TAIL_LEN;
/// Maximum number of bytes of a record behind its head, which may have more padding.
const BODY_MAX: usize = PLAIN_MAX + 256;
/// Maximum number of records of a handshake.
const HANDSHAKE_RECORDS_MAX: u32 = 64;
/// Records before a key is exchanged for the next one: RFC 8446 allows 2^24.5 of AES-GCM. Tests come that far.
const RECORDS_MAX: u64 = if cfg!(debug_assertions) { 1 << 11 } else { 1 << 23 };

const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const DATA: u8 = 23;
/// Of a handshake after the first: a ticket, which nobody uses, and the next key.
const NEW_TICKET: u8 = 4;
const KEY_UPDATE: u8 = 24;

const SECRET_MAX: usize = 48;

/// Algorithms of a cipher suite.
#[derive(Clone, Copy)]
struct TlsSuite {
    aead: &'static aead::Algorithm,
    hash: hkdf::Algorithm,
}

impl TlsSuite {
    fn of(suite: CipherSuite) -> Option<TlsSuite> {
        let (aead, hash) = match suite {
            CipherSuite::TLS13_AES_128_GCM_SHA256 => (&aead::AES_128_GCM, hkdf::HKDF_SHA256),
            CipherSuite::TLS13_AES_256_GCM_SHA384 => (&aead::AES_256_GCM, hkdf::HKDF_SHA384),
            CipherSuite::TLS13_CHACHA20_POLY1305_SHA256 => {
                (&aead::CHACHA20_POLY1305, hkdf::HKDF_SHA256)
            }
            _ => return None,
        };
        Some(TlsSuite { aead, hash })
    }
}

/// A number of bytes to be derived.
struct Derived(usize);

impl KeyType for Derived {
    fn len(&self) -> usize {
        self.0
    }
}

/// HKDF-Expand-Label of RFC 8446, without context.
fn expand(suite: TlsSuite, secret: &[u8], label: &[u8], into: &mut [u8]) {
    let prk = Prk::new_less_safe(suite.hash, secret);
    let lens = [&(into.len() as u16).to_be_bytes()[..], &[label.len() as u8 + 6]];
    let info = [lens[0], lens[1], b"tls13 ", label, &[0]];
    let filled = prk.expand(&info, Derived(into.len())).and_then(|derived| derived.fill(into));
    filled.expect("shorter than 255 hashes");
}

/// The key of one direction.
struct TrafficKey {
    suite: TlsSuite,
    secret: Zeroizing<[u8; SECRET_MAX]>,
    key: LessSafeKey,
    iv: [u8; aead::NONCE_LEN],
    /// Number of the next record.
    number: u64,
}

impl TrafficKey {
    fn new(suite: TlsSuite, secret: &[u8]) -> TrafficKey {
        let mut key = Zeroizing::new([0; 32]);
        let key = &mut key[..suite.aead.key_len()];
        expand(suite, secret, b"key", key);
        let unbound = UnboundKey::new(suite.aead, key).expect("as long as the algorithm's");
        let mut traffic = TrafficKey {
            suite,
            secret: Zeroizing::new([0; SECRET_MAX]),
            key: LessSafeKey::new(unbound),
            iv: [0; aead::NONCE_LEN],
            number: 0,
        };
        expand(suite, secret, b"iv", &mut traffic.iv);
        traffic.secret[..secret.len()].copy_from_slice(secret);
        traffic
    }

    /// Goes on to the next key.
    fn update(&mut self) {
        let len = self.suite.hash.len();
        let mut next = Zeroizing::new([0; SECRET_MAX]);
        expand(self.suite, &self.secret[..len], b"traffic upd", &mut next[..len]);
        *self = TrafficKey::new(self.suite, &next[..len]);
    }

    /// The nonce of the next record (invariant 1).
    fn nonce(&mut self) -> Nonce {
        let mut nonce = self.iv;
        let number = self.number.to_be_bytes();
        nonce[4..].iter_mut().zip(number).for_each(|(to, from)| *to ^= from);
        self.number += 1;
        Nonce::assume_unique_for_key(nonce)
    }
}

/// The keys of a connection, both ways.
pub(crate) struct TlsKeys {
    outgoing: TrafficKey,
    incoming: TrafficKey,
    /// The other side wants our next key.
    is_update_due: bool,
}

impl fmt::Debug for TlsKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsKeys")
    }
}

/// Content of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Opened {
    /// It is not there yet.
    Incomplete,
    /// The record has `len` bytes, of which those at `HEAD_LEN` and behind are data.
    Record { len: usize, data: usize },
}

impl Opened {
    /// Place of a record's data in it.
    pub(crate) const AT: usize = HEAD_LEN;
}

impl TlsKeys {
    /// True before a record that must carry the next key.
    pub(crate) fn is_update_due(&self) -> bool {
        self.is_update_due || self.outgoing.number >= RECORDS_MAX
    }

    /// Makes a record that changes the key; returns its length. It does not ask for the other side's next key: nbdkit
    /// answers that beside the threads that send, and then fails to open what it receives (seen with 1.32, GnuTLS 3.7).
    pub(crate) fn seal_update(&mut self, into: &mut [u8]) -> usize {
        self.is_update_due = false;
        let message = [KEY_UPDATE, 0, 0, 1, 0];
        into[HEAD_LEN..][..message.len()].copy_from_slice(&message);
        let len = self.seal(HANDSHAKE, into, message.len());
        self.outgoing.update();
        len
    }

    /// Makes a record of the `len` bytes that are in its place; returns its length.
    pub(crate) fn seal_record(&mut self, into: &mut [u8], len: usize) -> usize {
        self.seal(DATA, into, len)
    }

    fn seal(&mut self, kind: u8, into: &mut [u8], len: usize) -> usize {
        let body = len + TAIL_LEN;
        let head = [DATA, 3, 3, (body >> 8) as u8, body as u8];
        into[..HEAD_LEN].copy_from_slice(&head);
        into[HEAD_LEN + len] = kind;
        let (plain, tag) = into[HEAD_LEN..HEAD_LEN + body].split_at_mut(len + 1);
        let nonce = self.outgoing.nonce();
        let sealed = self.outgoing.key.seal_in_place_separate_tag(nonce, Aad::from(head), plain);
        tag.copy_from_slice(sealed.expect("a record is short").as_ref());
        HEAD_LEN + body
    }

    /// Opens the record at the start of `bytes`, in place.
    ///
    /// # Errors
    /// When it is none, was changed on its way, or ends the connection.
    pub(crate) fn open_record(&mut self, bytes: &mut [u8]) -> io::Result<Opened> {
        let Some(head) = bytes.first_chunk::<HEAD_LEN>().copied() else {
            return Ok(Opened::Incomplete);
        };
        let body = usize::from(u16::from_be_bytes([head[3], head[4]]));
        if head[0] != DATA || !(TAIL_LEN..=BODY_MAX).contains(&body) {
            return Err(invalid("a record of an unknown kind or an impossible length"));
        }
        let Some(sealed) = bytes.get_mut(HEAD_LEN..HEAD_LEN + body) else {
            return Ok(Opened::Incomplete);
        };
        let nonce = self.incoming.nonce();
        let opened = self.incoming.key.open_in_place(nonce, Aad::from(head), sealed);
        let plain = opened.map_err(|_| invalid("a record was changed on its way"))?;
        let Some(end) = plain.iter().rposition(|byte| *byte != 0) else {
            return Err(invalid("a record without a kind"));
        };
        let (plain, kind) = (&plain[..end], plain[end]);
        let data = match kind {
            DATA if end <= PLAIN_MAX => end,
            HANDSHAKE => self.take_messages(plain).map(|()| 0)?,
            ALERT => return Err(alert(plain)),
            _ => return Err(invalid("a record of an unknown kind or an impossible length")),
        };
        Ok(Opened::Record { len: HEAD_LEN + body, data })
    }

    /// Takes messages that come after the handshake.
    fn take_messages(&mut self, mut messages: &[u8]) -> io::Result<()> {
        const BROKEN: &str = "a message that nobody expects after the handshake";
        while let Some((head, rest)) = messages.split_first_chunk::<4>() {
            let len = u32::from_be_bytes([0, head[1], head[2], head[3]]) as usize;
            let (message, rest) = rest.split_at_checked(len).ok_or_else(|| invalid(BROKEN))?;
            match (head[0], message) {
                (NEW_TICKET, _) => {}
                // The last of its record: what follows has the next key.
                (KEY_UPDATE, [is_asked @ 0..=1]) if rest.is_empty() => {
                    self.incoming.update();
                    self.is_update_due |= *is_asked == 1;
                }
                _ => return Err(invalid(BROKEN)),
            }
            messages = rest;
        }
        if messages.is_empty() { Ok(()) } else { Err(invalid(BROKEN)) }
    }
}

/// The secrets of a handshake, as rustls gives them away for programs that look at traffic.
#[derive(Default)]
struct Secrets(Mutex<[Option<Zeroizing<Vec<u8>>>; 2]>);

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secrets")
    }
}

impl Secrets {
    const LABELS: [&str; 2] = ["CLIENT_TRAFFIC_SECRET_0", "SERVER_TRAFFIC_SECRET_0"];

    fn keys(&self, suite: CipherSuite) -> Option<TlsKeys> {
        let suite = TlsSuite::of(suite)?;
        let secrets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let [outgoing, incoming] = [0, 1].map(|at| {
            let secret = secrets[at].as_ref().filter(|secret| secret.len() == suite.hash.len());
            secret.map(|secret| TrafficKey::new(suite, secret))
        });
        Some(TlsKeys { outgoing: outgoing?, incoming: incoming?, is_update_due: false })
    }
}

impl KeyLog for Secrets {
    fn log(&self, label: &str, _client_random: &[u8], secret: &[u8]) {
        if let Some(at) = Secrets::LABELS.iter().position(|known| *known == label) {
            let mut secrets = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            secrets[at] = Some(Zeroizing::new(secret.to_vec()));
        }
    }

    fn will_log(&self, label: &str) -> bool {
        Secrets::LABELS.contains(&label)
    }
}

/// Shakes hands with the server of this name; its certificate must be signed by `ca-cert.pem` of the directory, and
/// `client-cert.pem` with `client-key.pem` are shown to it where they exist. The files are read each time, so that
/// certificates can be exchanged beside a process that runs.
///
/// # Errors
/// Those of the stream and of the files; [`io::ErrorKind::PermissionDenied`] for a server that is not believed, or does
/// not believe this client.
pub(crate) fn shake_hands(
    stream: &mut (impl Read + Write),
    certificates: &Path,
    host: &str,
) -> io::Result<TlsKeys> {
    let secrets = Arc::new(Secrets::default());
    let mut config = config(certificates)?;
    config.key_log = Arc::<Secrets>::clone(&secrets);
    let name = ServerName::try_from(host.to_owned());
    let name =
        name.map_err(|_| denied(format!("{host} is no name that a certificate can have")))?;
    let failed = |error| denied(explain(&error, certificates, host));
    let mut connection = ClientConnection::new(Arc::new(config), name).map_err(failed)?;
    for _ in 0..HANDSHAKE_RECORDS_MAX {
        while connection.wants_write() {
            connection.write_tls(stream)?;
        }
        if !connection.is_handshaking() {
            let suite = connection.negotiated_cipher_suite().map(|suite| suite.suite());
            let keys = suite.and_then(|suite| secrets.keys(suite));
            return keys.ok_or_else(|| invalid("no keys were agreed on"));
        }
        // One at a time: behind the last of the handshake records have the keys of data.
        let record = read_record(stream)?;
        connection.read_tls(&mut &record[..])?;
        if let Err(error) = connection.process_new_packets() {
            // It is told why, if it still listens.
            let _ = connection.write_tls(stream);
            return Err(failed(error));
        }
    }
    Err(invalid("a handshake without end"))
}

fn read_record(stream: &mut impl Read) -> io::Result<Vec<u8>> {
    let mut record = vec![0; HEAD_LEN];
    stream.read_exact(&mut record)?;
    let body = usize::from(u16::from_be_bytes([record[3], record[4]]));
    if body > BODY_MAX {
        return Err(invalid("a record of an impossible length"));
    }
    record.resize(HEAD_LEN + body, 0);
    stream.read_exact(&mut record[HEAD_LEN..])?;
    Ok(record)
}

fn config(certificates: &Path) -> io::Result<ClientConfig> {
    let unusable = |name: &str, error: &dyn fmt::Display| {
        denied(format!("{} cannot be used: {error}", certificates.join(name).display()))
    };
    let read = |name: &str| {
        let found = CertificateDer::pem_file_iter(certificates.join(name));
        let found = found.and_then(|found| found.collect::<Result<Vec<_>, pem::Error>>());
        found.map_err(|error| unusable(name, &error))
    };
    let mut roots = RootCertStore::empty();
    for root in read("ca-cert.pem")? {
        roots.add(root).map_err(|error| unusable("ca-cert.pem", &error))?;
    }
    if roots.is_empty() {
        return Err(unusable("ca-cert.pem", &"it has no certificate"));
    }
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = ClientConfig::builder_with_provider(provider)
        .with_protocol_versions(&[&rustls::version::TLS13])
        .map_err(|error| denied(error.to_string()))?
        .with_root_certificates(roots);
    let mut config = if certificates.join("client-cert.pem").exists() {
        let key = PrivateKeyDer::from_pem_file(certificates.join("client-key.pem"));
        let key = key.map_err(|error| unusable("client-key.pem", &error))?;
        let built = builder.with_client_auth_cert(read("client-cert.pem")?, key);
        built.map_err(|error| unusable("client-cert.pem", &error))?
    } else {
        builder.with_no_client_auth()
    };
    config.resumption = Resumption::disabled();
    Ok(config)
}

/// A failed handshake and its repair, for people.
fn explain(error: &rustls::Error, certificates: &Path, host: &str) -> String {
    let authority = certificates.join("ca-cert.pem");
    match error {
        rustls::Error::InvalidCertificate(error) => match error {
            CertificateError::UnknownIssuer | CertificateError::BadSignature => format!(
                "its certificate is signed by none of {}: that must be its operator's",
                authority.display()
            ),
            CertificateError::Expired | CertificateError::ExpiredContext { .. } => {
                "its certificate has expired: it needs a new one".to_owned()
            }
            CertificateError::NotValidForName => {
                format!("its certificate is not for {host}: name it as its certificate does")
            }
            CertificateError::NotValidForNameContext { presented, .. } => {
                // As `DnsName("memory.example")`.
                let names = presented.iter().map(|name| name.split('"').nth(1).unwrap_or(name));
                let names = names.collect::<Vec<_>>().join(", ");
                format!("its certificate is for {names}, not for {host}: name it by one of these")
            }
            error => format!("its certificate is refused: {error}"),
        },
        rustls::Error::AlertReceived(alert) => rejected(alert),
        error => format!("TLS fails: {error}"),
    }
}

/// The error of a server that ends the connection.
fn alert(alert: &[u8]) -> io::Error {
    match alert {
        [_, 0] => io::ErrorKind::UnexpectedEof.into(),
        [_, kind] => denied(rejected(&AlertDescription::from(*kind))),
        _ => invalid("an alert that is none"),
    }
}

fn rejected(how: &dyn fmt::Debug) -> String {
    format!("it ends TLS ({how:?}): it may demand a client-cert.pem, or not believe this one")
}

/// The error of what follows a handshake at once, where some servers just end the connection.
pub(crate) fn explain_end(error: io::Error) -> io::Error {
    use io::ErrorKind::{BrokenPipe, ConnectionReset, UnexpectedEof};
    match error.kind() {
        kind @ (BrokenPipe | ConnectionReset | UnexpectedEof) => denied(rejected(&kind)),
        _ => error,
    }
}

fn denied(what: String) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, what)
}

fn invalid(what: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Both ends of a connection.
    fn pair(suite: CipherSuite) -> [TlsKeys; 2] {
        let suite = TlsSuite::of(suite).expect("known");
        [(1, 2), (2, 1)].map(|(outgoing, incoming)| {
            let [outgoing, incoming] = [outgoing, incoming]
                .map(|byte| TrafficKey::new(suite, &[byte; SECRET_MAX][..suite.hash.len()]));
            TlsKeys { outgoing, incoming, is_update_due: false }
        })
    }

    fn seal(keys: &mut TlsKeys, data: &[u8]) -> Vec<u8> {
        let mut record = vec![0; RECORD_MAX];
        record[Opened::AT..][..data.len()].copy_from_slice(data);
        let len = keys.seal_record(&mut record, data.len());
        record.truncate(len);
        record
    }

    fn assert_opens(keys: &mut TlsKeys, mut record: Vec<u8>, data: &[u8]) {
        let (len, count) = (record.len(), data.len());
        let opened = keys.open_record(&mut record).expect("a record");
        assert_eq!(opened, Opened::Record { len, data: count });
        assert_eq!(&record[Opened::AT..][..count], data);
    }

    const SUITES: [CipherSuite; 3] = [
        CipherSuite::TLS13_AES_128_GCM_SHA256,
        CipherSuite::TLS13_AES_256_GCM_SHA384,
        CipherSuite::TLS13_CHACHA20_POLY1305_SHA256,
    ];

    #[test]
    fn records_are_opened_as_they_were_sealed_whatever_the_key() {
        for suite in SUITES {
            let [mut ours, mut theirs] = pair(suite);
            for round in 0..3 {
                assert_opens(&mut theirs, seal(&mut ours, &[round; 300]), &[round; 300]);
                let record = seal(&mut ours, &[round; PLAIN_MAX]);
                assert_eq!(record.len(), RECORD_MAX);
                assert_opens(&mut theirs, record, &[round; PLAIN_MAX]);
                // The other side is not asked for its next key, and gives one when it likes.
                let mut update = vec![0; RECORD_MAX];
                let len = ours.seal_update(&mut update);
                update.truncate(len);
                assert_opens(&mut theirs, update, &[]);
                assert!(!theirs.is_update_due() && ours.outgoing.number == 0);
                let mut update = vec![0; RECORD_MAX];
                let len = theirs.seal_update(&mut update);
                update.truncate(len);
                assert_opens(&mut ours, update, &[]);
                assert!(!theirs.is_update_due() && !ours.is_update_due());
                assert_opens(&mut ours, seal(&mut theirs, &[round; 5]), &[round; 5]);
            }
        }
    }

    #[test]
    fn a_key_is_changed_before_it_has_sealed_too_much() {
        let [mut ours, _] = pair(SUITES[0]);
        ours.outgoing.number = RECORDS_MAX;
        assert!(ours.is_update_due());
        ours.seal_update(&mut [0; 64]);
        assert!(!ours.is_update_due());
    }

    #[test]
    fn a_record_that_was_changed_or_repeated_or_left_out_is_none() {
        for at in [0, 3, 5, 20, 30] {
            let [mut ours, mut theirs] = pair(SUITES[0]);
            let mut record = seal(&mut ours, &[7; 12]);
            record[at] ^= 1;
            let opened = theirs.open_record(&mut record);
            assert!(matches!(opened, Err(_) | Ok(Opened::Incomplete)), "byte {at}: {opened:?}");
        }
        let [mut ours, mut theirs] = pair(SUITES[0]);
        let record = seal(&mut ours, &[7; 12]);
        assert_opens(&mut theirs, record.clone(), &[7; 12]);
        assert!(theirs.open_record(&mut record.clone()).is_err(), "twice");
        let [mut ours, mut theirs] = pair(SUITES[0]);
        drop(seal(&mut ours, &[7; 12]));
        assert!(theirs.open_record(&mut seal(&mut ours, &[8; 12])).is_err(), "one is missing");
    }

    #[test]
    fn what_follows_the_handshake_is_taken_or_refused() {
        let sent = |kind: u8, message: &[u8]| {
            let [mut ours, mut theirs] = pair(SUITES[0]);
            let mut record = vec![0; RECORD_MAX];
            record[HEAD_LEN..][..message.len()].copy_from_slice(message);
            let len = ours.seal(kind, &mut record, message.len());
            theirs.open_record(&mut record[..len])
        };
        let ticket = [NEW_TICKET, 0, 0, 2, 9, 9];
        assert!(sent(HANDSHAKE, &[KEY_UPDATE, 0, 0, 1, 1]).is_ok());
        assert!(sent(HANDSHAKE, &[ticket, ticket].concat()).is_ok());
        for message in [&[KEY_UPDATE, 0, 0, 1, 2][..], &[1, 0, 0, 0], &ticket[..5], &[4, 0, 0]] {
            assert!(sent(HANDSHAKE, message).is_err(), "{message:?}");
        }
        assert!(sent(HANDSHAKE, &[&[KEY_UPDATE, 0, 0, 1, 0][..], &ticket].concat()).is_err());
        assert!(sent(99, &[1]).is_err() && sent(0, &[0; 9]).is_err());
        let ended = sent(ALERT, &[1, 0]).expect_err("the end");
        assert_eq!(ended.kind(), io::ErrorKind::UnexpectedEof);
        let refused = sent(ALERT, &[2, 116]).expect_err("an alert").to_string();
        assert!(refused.contains("CertificateRequired"), "{refused}");
    }

    proptest! {
        #[test]
        fn any_bytes_of_a_server_are_a_record_or_an_error(
            mut bytes in prop::collection::vec(any::<u8>(), 0..400),
            is_record: bool,
        ) {
            if let (true, Some(head)) = (is_record, bytes.first_chunk_mut::<5>()) {
                *head = [DATA, 3, 3, 0, head[4]];
            }
            let [mut ours, _] = pair(SUITES[0]);
            prop_assert!(matches!(ours.open_record(&mut bytes), Err(_) | Ok(Opened::Incomplete)));
            let mut sent = io::Cursor::new([&b"\x16\x03\x03"[..], &bytes].concat());
            while read_record(&mut sent).is_ok() {}
        }
    }
}
