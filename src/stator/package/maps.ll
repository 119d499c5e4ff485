; std::unordered_map<std::string, at::Tensor*>, as libstdc++ has it: read, and filled.
;
; map: buckets, how many, first node, size.  node: next, string (data, length, 16 bytes), value, hash.

declare ptr @_Znwm(i64) nonlazybind  ; operator new
declare i64 @_ZSt11_Hash_bytesPKvmm(ptr, i64, i64) nonlazybind

; The names and tensors of a map, as an array to be freed.
define internal ptr @pairs_of_map(ptr %map, ptr %count_at) {
entry:
  %size_at = getelementptr i64, ptr %map, i64 3
  %size = load i64, ptr %size_at
  store i64 %size, ptr %count_at
  %room = add i64 %size, 1
  %pairs = call ptr @calloc(i64 %room, i64 16)
  %first_at = getelementptr ptr, ptr %map, i64 2
  %first = load ptr, ptr %first_at
  br label %head
head:
  %node = phi ptr [ %first, %entry ], [ %next, %body ]
  %i = phi i64 [ 0, %entry ], [ %next_i, %body ]
  %end = icmp eq ptr %node, null
  br i1 %end, label %done, label %body
body:
  %next = load ptr, ptr %node
  %name_at = getelementptr ptr, ptr %node, i64 1
  %name = load ptr, ptr %name_at
  %value_at = getelementptr ptr, ptr %node, i64 5
  %value = load ptr, ptr %value_at
  %pair = getelementptr %pair, ptr %pairs, i64 %i
  store ptr %name, ptr %pair
  %tensor_at = getelementptr %pair, ptr %pair, i64 0, i32 1
  store ptr %value, ptr %tensor_at
  %next_i = add i64 %i, 1
  br label %head
done:
  ret ptr %pairs
}

; Put a name and a tensor into a map that has neither.
define internal void @put_into_map(ptr %map, ptr %name, ptr %value) {
entry:
  %length = call i64 @strlen(ptr %name)
  %node = call ptr @_Znwm(i64 56)
  %data_at = getelementptr ptr, ptr %node, i64 1
  %length_at = getelementptr i64, ptr %node, i64 2
  %local = getelementptr i8, ptr %node, i64 24
  %with_end = add i64 %length, 1
  %short = icmp slt i64 %length, 16
  br i1 %short, label %fill, label %long
long:
  %far = call ptr @_Znwm(i64 %with_end)
  store i64 %length, ptr %local  ; how much there is room for
  br label %fill
fill:
  %data = phi ptr [ %local, %entry ], [ %far, %long ]
  store ptr %data, ptr %data_at
  store i64 %length, ptr %length_at
  call ptr @memcpy(ptr %data, ptr %name, i64 %with_end)
  %value_at = getelementptr ptr, ptr %node, i64 5
  store ptr %value, ptr %value_at
  %hash = call i64 @_ZSt11_Hash_bytesPKvmm(ptr %name, i64 %length, i64 3339675911)
  %hash_at = getelementptr i64, ptr %node, i64 6
  store i64 %hash, ptr %hash_at
  %buckets = load ptr, ptr %map
  %bucket_count_at = getelementptr i64, ptr %map, i64 1
  %bucket_count = load i64, ptr %bucket_count_at
  %number = urem i64 %hash, %bucket_count
  %bucket = getelementptr ptr, ptr %buckets, i64 %number
  %before = load ptr, ptr %bucket
  %used = icmp ne ptr %before, null
  br i1 %used, label %behind, label %front
behind:
  %following = load ptr, ptr %before
  store ptr %following, ptr %node
  store ptr %node, ptr %before
  br label %count
front:
  %first_at = getelementptr ptr, ptr %map, i64 2
  %first = load ptr, ptr %first_at
  store ptr %first, ptr %node
  store ptr %node, ptr %first_at
  store ptr %first_at, ptr %bucket
  %alone = icmp eq ptr %first, null
  br i1 %alone, label %count, label %relink
relink:
  %first_hash_at = getelementptr i64, ptr %first, i64 6
  %first_hash = load i64, ptr %first_hash_at
  %first_number = urem i64 %first_hash, %bucket_count
  %first_bucket = getelementptr ptr, ptr %buckets, i64 %first_number
  store ptr %node, ptr %first_bucket
  br label %count
count:
  %size_at = getelementptr i64, ptr %map, i64 3
  %size = load i64, ptr %size_at
  %larger = add i64 %size, 1
  store i64 %larger, ptr %size_at
  ret void
}

declare i64 @strlen(ptr) nonlazybind
declare ptr @memcpy(ptr, ptr, i64) nonlazybind
