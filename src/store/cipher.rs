//! The cipher of a [`EncryptedStore`](super::EncryptedStore): AES-256-GCM under a key made at start-up.
//!
//! ring's implementation: 9-10 GB/s on one core of the machine that was measured (0.5 us for
//! 4 KiB, 6.6 us for 64 KiB), where the crates `aes-gcm` and `chacha20poly1305` reach 2.4 and
//! 0.8 GB/s.
//!
//! # Invariants
//! 1. The key never leaves its own page of memory, which is not in core dumps, not inherited by
//!    `fork`, locked into RAM where the process may do that, and overwritten when dropped. (Copies
//!    that the compiler spills to the stack while the key is made cannot be ruled out.)
//! 2. A nonce is used once: it is a counter that only grows, and the key is made anew each time.

#![expect(unsafe_code, reason = "keeps the key in a mapping of its own")]

use crate::base::error::Result;
use crate::base::sync::{AtomicU64, Ordering};
use crate::sys;
use crate::sys::vm::{Huge, KERNEL_PAGE, Mapping};
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, Nonce, Tag, UnboundKey};
use std::fmt;
use zeroize::Zeroize;

/// Data needed, beside the key, to open a sealed block: the nonce's number and the tag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Seal {
    /// Never 0.
    pub(super) number: u64,
    pub(super) tag: [u64; 2],
}

/// A key and the number of its last use.
pub(super) struct Cipher {
    /// Begins with a [`LessSafeKey`].
    memory: Mapping,
    uses: AtomicU64,
}

const _: () = assert!(size_of::<LessSafeKey>() <= KERNEL_PAGE);
// Overwriting the key is all there is to dropping it.
const _: () = assert!(!std::mem::needs_drop::<LessSafeKey>());

impl Cipher {
    /// Makes a random key.
    ///
    /// # Errors
    /// [`Error::Os`](crate::Error::Os) without random numbers or a page of memory.
    pub(super) fn new() -> Result<Cipher> {
        let memory = Mapping::reserve(KERNEL_PAGE, KERNEL_PAGE, Huge::No)?;
        // Where locking is not allowed, the key may reach a swap device. That is no reason to
        // refuse to encrypt.
        drop(memory.lock_in_ram());
        let mut bytes = [0; 32];
        sys::random_bytes(&mut bytes)?;
        let key = UnboundKey::new(&AES_256_GCM, &bytes);
        bytes.zeroize();
        let key = LessSafeKey::new(key.expect("the key has the length of AES-256"));
        // SAFETY: the mapping is a page, long enough and aligned for the key, and nobody else's.
        unsafe { memory.as_ptr().cast::<LessSafeKey>().write(key) };
        Ok(Cipher { memory, uses: AtomicU64::new(0) })
    }

    fn key(&self) -> &LessSafeKey {
        // SAFETY: `new` put the key there; it changes only when `self` is dropped.
        unsafe { &*self.memory.as_ptr().cast::<LessSafeKey>() }
    }

    /// Encrypts a block in place; `block` is its number, to which the seal is bound.
    pub(super) fn seal(&self, block: u64, bytes: &mut [u8]) -> Seal {
        // Relaxed: a number is taken once, whatever else happens.
        let number = self.uses.fetch_add(1, Ordering::Relaxed) + 1;
        let tag = self
            .key()
            .seal_in_place_separate_tag(nonce(number), Aad::from(block.to_le_bytes()), bytes)
            .expect("a block is far shorter than what the cipher takes");
        let (low, high) = tag.as_ref().split_at(8);
        let half = |bytes: &[u8]| u64::from_le_bytes(bytes.try_into().expect("half of 16 bytes"));
        Seal { number, tag: [half(low), half(high)] }
    }

    /// Decrypts a block in place; returns whether the bytes are what was sealed. They are of no use if not.
    #[must_use]
    pub(super) fn open(&self, block: u64, seal: Seal, bytes: &mut [u8]) -> bool {
        let mut tag = [0; 16];
        tag[..8].copy_from_slice(&seal.tag[0].to_le_bytes());
        tag[8..].copy_from_slice(&seal.tag[1].to_le_bytes());
        let associated = Aad::from(block.to_le_bytes());
        self.key()
            .open_in_place_separate_tag(nonce(seal.number), associated, Tag::from(tag), bytes, 0..)
            .is_ok()
    }
}

impl Drop for Cipher {
    fn drop(&mut self) {
        if !self.memory.is_here() {
            return; // A forked child has no copy of the key.
        }
        // SAFETY: the page is this value's, which nobody uses any more; any bytes are a `u8`.
        let page = unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), KERNEL_PAGE) };
        page.zeroize();
    }
}

impl fmt::Debug for Cipher {
    /// Without the key.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cipher").finish_non_exhaustive()
    }
}

fn nonce(number: u64) -> Nonce {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&number.to_le_bytes());
    Nonce::assume_unique_for_key(bytes)
}

#[cfg(all(test, not(miri)))]
mod tests {
    use super::*;

    #[test]
    fn what_is_sealed_opens_once_more_and_only_as_the_same_block_and_bytes() {
        let cipher = Cipher::new().expect("a key");
        let plain = [7; 4096];
        let mut bytes = plain;
        let seal = cipher.seal(3, &mut bytes);
        assert_ne!(bytes, plain);
        let sealed = bytes;
        assert!(cipher.open(3, seal, &mut bytes), "untouched");
        assert_eq!(bytes, plain);
        let mut elsewhere = sealed;
        assert!(!cipher.open(4, seal, &mut elsewhere));
        let mut changed = sealed;
        changed[4095] ^= 1;
        assert!(!cipher.open(3, seal, &mut changed));
        let mut late = sealed;
        let later = Seal { number: seal.number + 1, ..seal };
        assert!(!cipher.open(3, later, &mut late));
    }

    #[test]
    fn the_same_content_is_never_sealed_the_same_twice() {
        let cipher = Cipher::new().expect("a key");
        let (mut a, mut b) = ([0; 64], [0; 64]);
        assert_ne!(cipher.seal(1, &mut a), cipher.seal(1, &mut b));
        assert_ne!(a, b);
    }

    #[test]
    fn two_keys_differ() {
        let (one, other) = (Cipher::new().expect("a key"), Cipher::new().expect("a key"));
        let mut bytes = [9; 64];
        let seal = one.seal(1, &mut bytes);
        assert!(!other.open(1, seal, &mut bytes));
    }
}
