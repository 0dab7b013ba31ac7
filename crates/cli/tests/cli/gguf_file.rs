//! A GGUF file as candle reads it.

use std::fs::File;
use std::path::Path;

use candle_core::quantized::QTensor;
use candle_core::quantized::gguf_file::{Content, Value as GgufValue, VersionedMagic};
use candle_core::{Device, Tensor};

/// A file, open.
pub struct Read {
    pub content: Content,
    file: File,
}

impl Read {
    pub fn open(path: &Path) -> Self {
        let mut file = File::open(path).unwrap();
        let content = Content::read(&mut file).unwrap();
        assert!(matches!(content.magic, VersionedMagic::GgufV3));
        assert!(content.tensor_data_offset.is_multiple_of(32));
        Self { content, file }
    }

    pub fn tensor(&mut self, name: &str) -> QTensor {
        self.content
            .tensor(&mut self.file, name, &Device::Cpu)
            .unwrap()
    }

    pub fn values(&mut self, name: &str) -> Tensor {
        self.tensor(name).dequantize(&Device::Cpu).unwrap()
    }

    pub fn count(&self, key: &str) -> u64 {
        self.content.metadata[key].to_u64().unwrap()
    }

    pub fn number(&self, key: &str) -> f32 {
        self.content.metadata[key].to_f32().unwrap()
    }

    pub fn text(&self, key: &str) -> &str {
        self.content.metadata[key].to_string().unwrap()
    }

    pub fn list(&self, key: &str) -> &[GgufValue] {
        self.content.metadata[key].to_vec().unwrap()
    }
}

/// All tensors of two files: the same, or so near.
pub fn assert_near(found: &Path, expected: &Path, most: f32) {
    let (mut found, mut expected) = (Read::open(found), Read::open(expected));
    let names: Vec<String> = expected.content.tensor_infos.keys().cloned().collect();
    assert_eq!(names.len(), found.content.tensor_infos.len());
    for name in names {
        let difference = (found.values(&name) - expected.values(&name))
            .unwrap()
            .abs()
            .unwrap();
        let largest = difference
            .flatten_all()
            .unwrap()
            .max(0)
            .unwrap()
            .to_scalar::<f32>()
            .unwrap();
        assert!(largest <= most, "{name}: {largest}");
    }
}
