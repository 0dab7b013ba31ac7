//! XXH64, the 64-bit checksum of the files of a checkpoint: as `xxhsum -H1` prints it.
//!
//! Written out after its specification (github.com/Cyan4973/xxHash, doc/xxhash_spec.md), as the standard library's hash may change
//! with the compiler, and checkpoints outlive it.

const PRIME_1: u64 = 0x9E37_79B1_85EB_CA87;
const PRIME_2: u64 = 0xC2B2_AE3D_27D4_EB4F;
const PRIME_3: u64 = 0x1656_67B1_9E37_79F9;
const PRIME_4: u64 = 0x85EB_CA77_C2B2_AE63;
const PRIME_5: u64 = 0x27D4_EB2F_1656_67C5;

/// Bytes that are mixed at a time, 8 for each of four lanes.
const STRIPE: usize = 32;

/// The checksum of bytes that come in parts.
#[derive(Clone, Debug)]
pub struct Xxh64 {
    lanes: [u64; 4],
    /// The bytes of a stripe that is not full yet.
    rest: [u8; STRIPE],
    num_rest: usize,
    num_bytes: u64,
}

impl Default for Xxh64 {
    fn default() -> Self {
        let lanes = [
            PRIME_1.wrapping_add(PRIME_2),
            PRIME_2,
            0,
            PRIME_1.wrapping_neg(),
        ];
        Self {
            lanes,
            rest: [0; STRIPE],
            num_rest: 0,
            num_bytes: 0,
        }
    }
}

impl Xxh64 {
    /// The checksum of `bytes`.
    pub fn of(bytes: &[u8]) -> u64 {
        let mut hash = Self::default();
        hash.update(bytes);
        hash.finish()
    }

    /// Adds bytes.
    pub fn update(&mut self, mut bytes: &[u8]) {
        self.num_bytes += bytes.len() as u64;
        if self.num_rest > 0 {
            let taken = bytes.len().min(STRIPE - self.num_rest);
            self.rest[self.num_rest..self.num_rest + taken].copy_from_slice(&bytes[..taken]);
            self.num_rest += taken;
            bytes = &bytes[taken..];
            if self.num_rest < STRIPE {
                return;
            }
            mix(&mut self.lanes, &self.rest);
        }
        let stripes = bytes.chunks_exact(STRIPE);
        let rest = stripes.remainder();
        let mut lanes = self.lanes;
        stripes.for_each(|stripe| mix(&mut lanes, stripe));
        self.lanes = lanes;
        self.rest[..rest.len()].copy_from_slice(rest);
        self.num_rest = rest.len();
    }

    /// The checksum of all bytes so far.
    pub fn finish(&self) -> u64 {
        let mut hash = PRIME_5;
        if self.num_bytes >= STRIPE as u64 {
            let turned = self.lanes.iter().zip([1, 7, 12, 18]);
            hash = turned.fold(0, |sum, (lane, turn)| {
                sum.wrapping_add(lane.rotate_left(turn))
            });
            for &lane in &self.lanes {
                hash = (hash ^ round(0, lane)).wrapping_mul(PRIME_1);
                hash = hash.wrapping_add(PRIME_4);
            }
        }
        hash = hash.wrapping_add(self.num_bytes);
        let words = self.rest[..self.num_rest].chunks_exact(8);
        let rest = words.remainder();
        for bytes in words {
            hash ^= round(0, word(bytes));
            hash = hash.rotate_left(27).wrapping_mul(PRIME_1);
            hash = hash.wrapping_add(PRIME_4);
        }
        let halves = rest.chunks_exact(4);
        let rest = halves.remainder();
        for bytes in halves {
            hash ^= word(bytes).wrapping_mul(PRIME_1);
            hash = hash.rotate_left(23).wrapping_mul(PRIME_2);
            hash = hash.wrapping_add(PRIME_3);
        }
        for &byte in rest {
            hash ^= u64::from(byte).wrapping_mul(PRIME_5);
            hash = hash.rotate_left(11).wrapping_mul(PRIME_1);
        }
        hash = (hash ^ (hash >> 33)).wrapping_mul(PRIME_2);
        hash = (hash ^ (hash >> 29)).wrapping_mul(PRIME_3);
        hash ^ (hash >> 32)
    }
}

fn mix(lanes: &mut [u64; 4], stripe: &[u8]) {
    for (lane, bytes) in lanes.iter_mut().zip(stripe.chunks_exact(8)) {
        *lane = round(*lane, word(bytes));
    }
}

fn round(lane: u64, word: u64) -> u64 {
    let sum = lane.wrapping_add(word.wrapping_mul(PRIME_2));
    sum.rotate_left(31).wrapping_mul(PRIME_1)
}

/// Up to 8 bytes as a number, the lowest first.
fn word(bytes: &[u8]) -> u64 {
    let mut word = [0; 8];
    word[..bytes.len()].copy_from_slice(bytes);
    u64::from_le_bytes(word)
}

#[cfg(test)]
mod tests {
    use super::Xxh64;

    /// Printed by `xxhsum -H1`.
    #[test]
    fn known_checksums() {
        for (bytes, sum) in [
            ("", 0xef46_db37_51d8_e999),
            ("a", 0xd24e_c4f1_a98c_6e5b),
            ("abc", 0x44bc_2cf5_ad77_0999),
        ] {
            assert_eq!(Xxh64::of(bytes.as_bytes()), sum, "{bytes:?}");
        }
    }

    #[test]
    fn parts_do_not_matter_and_every_bit_does() {
        let bytes: Vec<u8> = (0..211u32).map(|i| (i * i % 251) as u8).collect();
        let whole = Xxh64::of(&bytes);
        for len in 1..bytes.len() {
            let mut hash = Xxh64::default();
            bytes.chunks(len).for_each(|part| hash.update(part));
            assert_eq!(hash.finish(), whole, "parts of {len} bytes");
        }
        for bit in 0..8 * bytes.len() {
            let mut bytes = bytes.clone();
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_ne!(Xxh64::of(&bytes), whole, "bit {bit}");
        }
    }
}
