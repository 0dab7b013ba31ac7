//! Values that are kept on the host: the same bits there and back, however many copies are under way and whoever stops waiting.

use crate::check::{device, on_each_device, placed};
use candle_core::{DType, Device, Result, Tensor, WithDType};
use candle_ops::{HostBuffer, HostCopies, HostCopy};
use half::{bf16, f16};
use rand::{RngCore, SeedableRng};
use rand_chacha::ChaCha8Rng;

/// Random bits, some of which are NaNs. On a GPU fresh memory of the emulated one would be other NaNs.
fn bits(seed: u64, len: usize) -> Vec<u32> {
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    (0..len).map(|_| rng.next_u32()).collect()
}

/// The values of these bits, in the middle of a larger tensor that the device has just joined.
fn values(bits: &[u32]) -> Result<Tensor> {
    let floats: Vec<f32> = bits.iter().map(|bits| f32::from_bits(*bits)).collect();
    let values = placed(&Tensor::from_vec(floats, bits.len(), &Device::Cpu)?)?;
    let others = placed(&Tensor::zeros(5, DType::F32, &Device::Cpu)?)?;
    match bits.len() {
        0 => Ok(values),
        len => Tensor::cat(&[&others, &values, &others], 0)?.narrow(0, 5, len),
    }
}

#[track_caller]
fn assert_bits(got: &Tensor, want: &[u32]) -> Result<()> {
    let got: Vec<f32> = got.to_device(&Device::Cpu)?.to_vec1()?;
    let got: Vec<u32> = got.into_iter().map(f32::to_bits).collect();
    assert!(got == want, "{} values: other bits", want.len());
    Ok(())
}

/// Stores the values of these bits and drops the handle and the values at once.
fn store(copies: &HostCopies, bits: &[u32], buffer: &mut HostBuffer) -> Result<()> {
    drop(copies.start_store(values(bits)?, buffer)?);
    Ok(())
}

/// Overwrites the memory of the device that the last values have left.
fn compute(len: usize) -> Result<()> {
    let ones = Tensor::ones(len + 10, DType::F32, &device())?;
    (0..4).try_for_each(|_| (&ones + &ones).map(drop))
}

fn narrow<T>(bits: &[u32], from: impl Fn(u32) -> T) -> Vec<T> {
    bits.iter().map(|&bits| from(bits)).collect()
}

fn there_and_back<T: WithDType + PartialEq>(copies: &HostCopies, want: Vec<T>) -> Result<()> {
    let mut buffer = copies.buffer(want.len(), T::DTYPE)?;
    let values = Tensor::from_slice(&want, want.len(), &Device::Cpu)?;
    drop(copies.start_store(values.to_device(&device())?, &mut buffer)?);
    let fetched = copies.start_fetch(&mut buffer)?.wait()?;
    assert!(fetched.to_vec1::<T>()? == want, "{:?}", T::DTYPE);
    Ok(())
}

#[test]
fn bits_come_back_as_they_were() -> Result<()> {
    on_each_device(|| {
        let copies = HostCopies::new(&device())?;
        for len in [0, 1, 7, 64, 1000] {
            let want = bits(len as u64, len);
            let mut buffer = copies.buffer(len, DType::F32)?;
            let stored = copies.start_store(values(&want)?, &mut buffer)?;
            assert_bits(&stored.wait()?, &want)?;
            for _ in 0..2 {
                assert_bits(&copies.start_fetch(&mut buffer)?.wait()?, &want)?;
            }
            for part in [0..0, 0..len / 2, len / 3..len, len..len] {
                let fetched = copies.start_fetch_part(&mut buffer, part.clone())?;
                assert_bits(&fetched.wait()?, &want[part])?;
            }
            if len > 0 {
                there_and_back(&copies, narrow(&want, |bits| bits as i16))?;
                there_and_back(&copies, narrow(&want, |bits| bits as u8))?;
                // Not NaN, which is not equal to itself.
                let small = |bits: u32| f32::from(bits as i16);
                there_and_back(&copies, narrow(&want, |b| bf16::from_f32(small(b))))?;
                there_and_back(&copies, narrow(&want, |b| f16::from_f32(small(b))))?;
            }
        }
        Ok(())
    })
}

#[test]
fn many_copies_are_under_way_at_once_in_both_directions() -> Result<()> {
    on_each_device(|| {
        let copies = HostCopies::new(&device())?;
        for round in 0..4 {
            let lens = [300, 20, 1, 700, 64, 65];
            let want = lens.map(|len| bits(10 * round + len as u64, len));
            let (mut buffers, mut stores, mut fetches) = (Vec::new(), Vec::new(), Vec::new());
            for want in &want {
                let mut buffer = copies.buffer(want.len(), DType::F32)?;
                stores.push(copies.start_store(values(want)?, &mut buffer)?);
                buffers.push(buffer);
            }
            for buffer in &mut buffers {
                fetches.push(copies.start_fetch(buffer)?);
            }
            for ((store, fetch), want) in stores.into_iter().zip(fetches).zip(&want).rev() {
                assert_bits(&fetch.wait()?, want)?;
                assert_bits(&store.wait()?, want)?;
            }
        }
        Ok(())
    })
}

#[test]
fn copies_of_one_buffer_keep_their_order() -> Result<()> {
    on_each_device(|| {
        let copies = HostCopies::new(&device())?;
        let want: Vec<Vec<u32>> = (0..5).map(|seed| bits(seed, 200)).collect();
        let mut buffer = copies.buffer(200, DType::F32)?;
        let mut fetches = Vec::new();
        for want in &want {
            store(&copies, want, &mut buffer)?;
            fetches.push(copies.start_fetch(&mut buffer)?);
        }
        for (fetch, want) in fetches.into_iter().zip(&want) {
            assert_bits(&fetch.wait()?, want)?;
        }
        Ok(())
    })
}

#[test]
fn copies_that_nobody_waits_for_are_made_and_leave_no_trace() -> Result<()> {
    on_each_device(|| {
        let copies = HostCopies::new(&device())?;
        for round in 0..4 {
            let want = bits(round, 500);
            let mut buffer = copies.buffer(500, DType::F32)?;
            store(&copies, &want, &mut buffer)?;
            compute(500)?;
            drop(copies.start_fetch(&mut buffer)?);
            compute(500)?;
            let fetch = copies.start_fetch(&mut buffer)?;
            // The host's memory must outlive the copy from it.
            drop(buffer);
            compute(500)?;
            assert_bits(&fetch.wait()?, &want)?;
            // And the one to it, though nobody will see what arrives.
            let mut buffer = copies.buffer(500, DType::F32)?;
            store(&copies, &want, &mut buffer)?;
        }
        let want = bits(9, 500);
        let (fetch, _buffer) = {
            let copies = HostCopies::new(&device())?;
            let mut buffer = copies.buffer(500, DType::F32)?;
            store(&copies, &want, &mut buffer)?;
            (copies.start_fetch(&mut buffer)?, buffer)
        };
        assert_bits(&fetch.wait()?, &want)
    })
}

#[track_caller]
fn assert_says(result: Result<HostCopy>, part: &str) {
    let said = result.map(drop).expect_err("nothing to copy").to_string();
    assert!(said.contains(part), "{part:?} is not in: {said}");
}

#[test]
fn what_cannot_be_copied_is_an_error_and_changes_nothing() -> Result<()> {
    on_each_device(|| {
        let copies = HostCopies::new(&device())?;
        let mut buffer = copies.buffer(6, DType::F32)?;
        assert_says(copies.start_fetch(&mut buffer), "nothing was stored");
        let want = bits(1, 6);
        store(&copies, &want, &mut buffer)?;
        let xs = values(&bits(2, 12))?;
        for wrong in [
            xs.clone(),
            xs.reshape((2, 6))?.get(0)?.reshape((2, 3))?,
            xs.reshape((6, 2))?.narrow(1, 0, 1)?.squeeze(1)?,
            xs.narrow(0, 0, 6)?.to_dtype(DType::BF16)?,
            Tensor::zeros(6, DType::I16, &device())?,
        ] {
            assert_says(copies.start_store(wrong, &mut buffer), "6 F32 values");
        }
        if device().is_cuda() {
            let host = xs.narrow(0, 0, 6)?.to_device(&Device::Cpu)?;
            assert_says(copies.start_store(host, &mut buffer), "not on a GPU");
            let of_the_cpu = HostCopies::new(&Device::Cpu)?;
            assert_says(of_the_cpu.start_fetch(&mut buffer), "another device");
        }
        assert_says(copies.start_fetch_part(&mut buffer, 3..7), "none at 3..7");
        assert_bits(&copies.start_fetch(&mut buffer)?.wait()?, &want)
    })
}
