//! Judges servers that are to keep evicted pages.

use super::{Check, Verdict};
use farheap::ByteCount;
use farheap_nbd::{ServerAddress, ServerList};
use std::time::Duration;

/// How long a server may take to answer.
const WAIT_MAX: Duration = Duration::from_secs(5);
/// The smallest store, with what stays free at its ends.
const EXPORT_MIN: ByteCount = ByteCount::mib(2);

/// Checks each server of a device's name.
pub(super) fn checks(device: &str) -> Vec<Check> {
    // Of a list that is wrong each address is judged: the check of the wrong one tells.
    let list = device.parse::<ServerList>();
    let addresses = list.as_ref().map_or(device, |list| list.text.as_str());
    addresses.split(',').flat_map(|address| server(address.trim())).collect()
}

fn server(text: &str) -> Vec<Check> {
    const NAME: &str = "server";
    let address = match text.parse::<ServerAddress>() {
        Ok(address) => address,
        Err(error) => return vec![Check::new(NAME, Verdict::Fail, error.to_string())],
    };
    let export = match address.probe(WAIT_MAX) {
        Ok(export) => export,
        Err(error) => {
            let repair = match address.certificates() {
                None => "nbdkit memory 64G",
                Some(_) => {
                    "nbdkit --tls=require --tls-certificates=DIR --tls-verify-peer memory 64G"
                }
            };
            return vec![
                Check::new(NAME, Verdict::Fail, error.to_string())
                    .repair_when("on the machine with memory to spare:", repair),
            ];
        }
    };
    let size = ByteCount(export.size());
    let found = format!("{address}, {size}");
    let defect = match export.defect() {
        None if size < EXPORT_MIN => Some(format!("has {size}, less than {EXPORT_MIN}")),
        defect => defect,
    };
    if let Some(defect) = defect {
        return vec![Check::new(NAME, Verdict::Fail, found).meaning(defect)];
    }
    let discard = if export.can_trim() {
        Check::new("discard", Verdict::Pass, "freed space goes back to the server")
    } else {
        Check::new("discard", Verdict::Warn, "not supported")
            .meaning("freed pages are reused, but the server is not told that they are free")
    };
    vec![Check::new(NAME, Verdict::Pass, found), discard]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_that_cannot_be_reached_fails_with_what_to_start() {
        let checks = checks(
            "nbd+unix:///x?socket=/nonexistent/socket,nbd://,\
             nbds://127.0.0.1:1/?tls-certificates=/nonexistent&encrypt=off",
        );
        assert_eq!(checks.len(), 3);
        for check in &checks {
            assert!(format!("{check:?}").contains("Fail"), "{check:?}");
        }
        assert!(format!("{:?}", checks[2]).contains("--tls=require"), "{checks:?}");
    }
}
