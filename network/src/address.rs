//! Addresses of exports, as users write them.

use std::fmt;
use std::net::{SocketAddr, ToSocketAddrs as _};
use std::path::{Path, PathBuf};

/// The port that servers listen on unless they are told otherwise.
const PORT: u16 = 10809;

/// Place of a server and name of its export.
///
/// # Examples
/// ```
/// use farheap_nbd::ServerAddress;
///
/// let address: ServerAddress = "nbd://memory.example/cold".parse()?;
/// assert_eq!(address.to_string(), "nbd://memory.example:10809/cold");
/// assert!(!address.is_local());
/// let address: ServerAddress = "nbd+unix:///?socket=/run/nbd.sock".parse()?;
/// assert!(address.is_local());
/// let address: ServerAddress = "nbds://memory.example/cold?tls-certificates=/etc/pki/nbd".parse()?;
/// assert!(address.certificates().is_some());
/// # Ok::<(), farheap_nbd::NetworkError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerAddress {
    place: ServerPlace,
    export: String,
    /// Of TLS.
    certificates: Option<PathBuf>,
}

/// Servers as a device's name has them: addresses with commas between, and options behind the last one, after `?` or `&`.
///
/// # Examples
/// ```
/// use farheap_nbd::ServerList;
///
/// let list: ServerList = "nbd://a/x, nbd://b/x, nbd://c/x?parity=1&encrypt=off".parse()?;
/// assert_eq!((list.addresses.len(), list.parity, list.is_plain), (3, 1, true));
/// # Ok::<(), farheap_nbd::NetworkError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServerList {
    /// The addresses.
    pub addresses: Vec<ServerAddress>,
    /// Number of servers that may be lost at a time, of servers that hold pages with parity: `parity=1` or `2`. 0: all
    /// hold the same.
    pub parity: usize,
    /// Number of servers that are left of a table's: `copies=`, where others are lost for good. 0: not given.
    pub copies: usize,
    /// Pages are not to be encrypted: `encrypt=off`.
    pub is_plain: bool,
    /// The addresses as they were written.
    pub text: String,
}

impl ServerList {
    /// Reads a device's name; `None`: it is a path.
    ///
    /// # Errors
    /// An address that is none.
    #[must_use]
    pub fn of(name: &str) -> Option<Result<ServerList, NetworkError>> {
        ServerAddress::is_address(name).then(|| name.parse())
    }

    /// True if pages are to be encrypted on the way, because others may listen or read the server's memory.
    #[must_use]
    pub fn wants_encryption(&self) -> bool {
        !self.is_plain && !self.addresses.iter().all(ServerAddress::is_local)
    }
}

impl std::str::FromStr for ServerList {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<ServerList, NetworkError> {
        let (mut rest, mut parity, mut copies, mut is_plain) = (text, 0, 0, false);
        while let Some((before, option)) = rest.rsplit_once(['?', '&']) {
            match option.split_once('=') {
                Some(("encrypt", "off")) => is_plain = true,
                Some(("copies", count)) => copies = count.parse().unwrap_or(usize::MAX),
                Some(("parity", count @ ("1" | "2"))) => {
                    parity = usize::from(count.as_bytes()[0] - b'0')
                }
                Some(("parity", _)) => {
                    return Err(NetworkError::new(
                        text,
                        "parity is 1 or 2: servers that may be lost",
                    ));
                }
                _ => break,
            }
            rest = before;
        }
        let addresses = rest.split(',').map(|address| address.trim().parse());
        let addresses = addresses.collect::<Result<Vec<_>, _>>()?;
        if copies != 0 && copies != addresses.len() {
            return Err(NetworkError::new(text, "copies is the number of servers that are named"));
        }
        Ok(ServerList { addresses, parity, copies, is_plain, text: rest.to_owned() })
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum ServerPlace {
    /// `host:port`.
    Tcp(String),
    Unix(PathBuf),
}

/// Where a server's socket is, looked up.
#[derive(Clone, Debug)]
pub(crate) enum Endpoint {
    Tcp(Vec<SocketAddr>),
    Unix(PathBuf),
}

/// An address or a server that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NetworkError {
    /// The address.
    pub address: String,
    /// Its defect.
    pub reason: String,
}

impl fmt::Display for NetworkError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.address, self.reason)
    }
}

impl std::error::Error for NetworkError {}

impl NetworkError {
    pub(crate) fn new(
        address: &(impl fmt::Display + ?Sized),
        reason: impl Into<String>,
    ) -> NetworkError {
        NetworkError { address: address.to_string(), reason: reason.into() }
    }
}

impl ServerAddress {
    /// True if `text` is meant as an address rather than as a path.
    #[must_use]
    pub fn is_address(text: &str) -> bool {
        text.split_once("://").is_some_and(|(scheme, _)| scheme.starts_with("nbd"))
    }

    /// True if the server is reached by a Unix socket: nobody can listen on the way.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self.place, ServerPlace::Unix(_))
    }

    /// Directory of the certificates by which server and client know each other, for a server that is spoken to by TLS.
    #[must_use]
    pub fn certificates(&self) -> Option<&Path> {
        self.certificates.as_deref()
    }

    /// The host's name, without brackets and port.
    pub(crate) fn host(&self) -> &str {
        let ServerPlace::Tcp(host) = &self.place else { return "" };
        let host = host.rsplit_once(':').map_or(&host[..], |(host, _)| host);
        host.trim_matches(['[', ']'])
    }

    /// The export's name; mostly empty.
    #[must_use]
    pub fn export(&self) -> &str {
        &self.export
    }

    /// Looks the host up, which may wait for a name server.
    pub(crate) fn look_up(&self) -> Result<Endpoint, NetworkError> {
        match &self.place {
            ServerPlace::Unix(path) => Ok(Endpoint::Unix(path.clone())),
            ServerPlace::Tcp(host) => match host.to_socket_addrs() {
                Ok(found) => Ok(Endpoint::Tcp(found.collect())),
                Err(error) => {
                    Err(NetworkError::new(self, format!("its host is not known: {error}")))
                }
            },
        }
    }
}

impl std::str::FromStr for ServerAddress {
    type Err = NetworkError;

    fn from_str(text: &str) -> Result<ServerAddress, NetworkError> {
        const FORMS: &str = "write nbd://HOST/EXPORT, nbd://HOST:PORT/EXPORT, \
                             nbds://HOST/EXPORT?tls-certificates=DIR or nbd+unix:///EXPORT?socket=PATH";
        let refused = |why: &str| Err(NetworkError::new(text, format!("{why}; {FORMS}")));
        let Some((scheme, rest)) = text.split_once("://") else { return refused("is no address") };
        let (rest, query) = rest.split_once('?').unwrap_or((rest, ""));
        let (host, export) = rest.split_once('/').unwrap_or((rest, ""));
        let certificates = query.strip_prefix("tls-certificates=").filter(|dir| !dir.is_empty());
        let place = match (scheme, query.strip_prefix("socket=")) {
            ("nbd", _) if !query.is_empty() => return refused("nothing follows the export's name"),
            ("nbds", _) if certificates.is_none() => {
                return refused(
                    "names no directory with ca-cert.pem, client-cert.pem and client-key.pem",
                );
            }
            ("nbd" | "nbds", _) if host.is_empty() => return refused("names no host"),
            ("nbd" | "nbds", _) => {
                // Colons of an IPv6 address are within brackets.
                let has_port = host.rsplit(']').next().is_some_and(|end| end.contains(':'));
                let port = if has_port { String::new() } else { format!(":{PORT}") };
                ServerPlace::Tcp(format!("{host}{port}"))
            }
            ("nbd+unix", Some(path)) if host.is_empty() && !path.is_empty() => {
                ServerPlace::Unix(path.into())
            }
            ("nbd+unix", _) => return refused("names no socket"),
            _ => return refused("is of another kind"),
        };
        let certificates = certificates.filter(|_| scheme == "nbds").map(PathBuf::from);
        Ok(ServerAddress { place, export: export.to_owned(), certificates })
    }
}

impl fmt::Display for ServerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.place, &self.certificates) {
            (ServerPlace::Tcp(host), None) => write!(f, "nbd://{host}/{}", self.export),
            (ServerPlace::Tcp(host), Some(certificates)) => {
                let (export, certificates) = (&self.export, certificates.display());
                write!(f, "nbds://{host}/{export}?tls-certificates={certificates}")
            }
            (ServerPlace::Unix(path), _) => {
                write!(f, "nbd+unix:///{}?socket={}", self.export, path.display())
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn addresses_print_as_they_are_read() {
        for (text, printed) in [
            ("nbd://a", "nbd://a:10809/"),
            ("nbd://a:7/x/y", "nbd://a:7/x/y"),
            ("nbd://[::1]/x", "nbd://[::1]:10809/x"),
            ("nbd://[::1]:7/x", "nbd://[::1]:7/x"),
            ("nbd+unix:///x?socket=/run/s", "nbd+unix:///x?socket=/run/s"),
            ("nbds://a/x?tls-certificates=/p", "nbds://a:10809/x?tls-certificates=/p"),
        ] {
            let address: ServerAddress = text.parse().expect(text);
            assert_eq!(address.to_string(), printed);
            assert_eq!(printed.parse(), Ok(address));
        }
    }

    #[test]
    fn options_of_all_servers_follow_the_last_one() {
        let list = |text: &str| text.parse::<ServerList>().map_err(|error| error.to_string());
        let unix = "nbd+unix:///x?socket=/a";
        for (options, parity, is_plain) in [
            ("", 0, false),
            ("&encrypt=off", 0, true),
            ("&parity=2", 2, false),
            ("&parity=1&encrypt=off", 1, true),
            ("&encrypt=off&parity=1", 1, true),
        ] {
            let list = list(&format!("{unix},{unix}{options}")).expect(options);
            assert_eq!((list.parity, list.is_plain, list.addresses.len()), (parity, is_plain, 2));
            assert_eq!(list.text, format!("{unix},{unix}"));
        }
        for wrong in ["0", "3", "", "12"] {
            let error = list(&format!("nbd://a/?parity={wrong}")).expect_err(wrong);
            assert!(error.contains("parity is 1 or 2"), "{error}");
        }
        assert!(list("nbd://a/?copies=2").is_err());
    }

    #[test]
    fn a_certificate_is_asked_for_the_host_alone() {
        for (host, name) in [("a", "a"), ("a:7", "a"), ("[::1]", "::1"), ("[::1]:7", "::1")] {
            let address: ServerAddress =
                format!("nbds://{host}/?tls-certificates=/p").parse().expect(host);
            assert_eq!(address.host(), name);
        }
    }

    #[test]
    fn what_is_no_address_is_refused_with_the_forms_there_are() {
        for text in [
            "a",
            "nbd://",
            "nbd:///x",
            "nbd://a/x?y=z",
            "nbd+unix:///x",
            "nbd+vsock://1/",
            "nbds://a/x",
            "nbds://a/x?tls-certificates=",
            "nbds:///x?tls-certificates=/p",
        ] {
            let error = text.parse::<ServerAddress>().expect_err(text);
            assert!(error.to_string().contains("nbd://HOST/EXPORT"), "{error}");
        }
        assert!(ServerAddress::is_address("nbd+unix:///?socket=x"));
        assert!(!ServerAddress::is_address("/dev/nbd0") && !ServerAddress::is_address("nbd:/x"));
    }
}
